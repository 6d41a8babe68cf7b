"""One spelling for each thing that answers spell in many ways."""

from __future__ import annotations

import re

UNICODE = str.maketrans({
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": "*", "·": "*", "⋅": "*", "∙": "*", "÷": "/", "∕": "/",
    "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∪": "\\cup ",
    "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ", "∅": "\\emptyset ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
    "°": "^\\circ ", "′": "'", "’": "'", "“": '"', "”": '"', "…": "\\ldots ", "½": "\\frac{1}{2}",
    "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "⅓": "\\frac{1}{3}", "⅔": "\\frac{2}{3}", "²": "^{2}", "³": "^{3}",
    "\u00a0": " ", "\u2009": " ", "\u202f": " ", "％": "%", "，": ",", "（": "(", "）": ")", "：": ":", "＝": "=",
})  # fmt: skip
SPACING = re.compile(r"\\(?:[,;:! ]|quad\b|qquad\b|hspace\*?\{[^}]*\}|hfill\b|thinspace\b)|~")
SIZES = re.compile(
    r"\\(?:left|right|middle|bigl|bigr|biggl|biggr|Bigl|Bigr|Biggl|Biggr|big|Big|bigg|Bigg|displaystyle|textstyle"
    r"|limits|nolimits|mathord|mathbin|bf|rm|it)(?![a-zA-Z])\.?"
)
WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|mbox|hbox|boldsymbol|bm|emph"
    r"|underline|overline|boxed|fbox|mathcal|mathbb|ensuremath)\s*\{([^{}]*)\}"
)
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,(?:\\!)?|\{,\}|\\[,;:!] ?|[ ])\d{3})+(?![\d])")
UNITS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALE = re.compile(rf"(?<=\d)\s*({'|'.join(UNITS_OF_TEN)})\b", re.IGNORECASE)
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+\.\d+|\d)[eE]([-+]?\d+)(?![\w.])")
REPEATING = re.compile(r"(?<!\d)(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
NUMBER_WORDS = {word: str(n) for n, word in enumerate(SMALL.split(" "))}


def clean(text: str) -> str:
    """The same answer with one spelling for each thing that has many."""
    text = text.strip().translate(UNICODE).strip("*` ").replace("\\\\", " \\cr ")
    text = re.sub(r"√\s*(\w+|\()", lambda m: "sqrt" + (m[1] if m[1] == "(" else f"({m[1]})"), text)
    text = (
        text.replace("\\$", "\\text{$}").replace("\\%", "%").replace("**", "^" if "^" not in text else "**")
    )
    text = re.sub(r"^\s*(?:\$\$?|\\\[|\\\()|(?<![\d])(?:\$\$?|\\\]|\\\))\s*[.,;]?\s*$", "", text)
    if text.count("$") and not re.search(r"\$\s*\d", text):
        text = text.replace("$", "")
    elif len(re.findall(r"(?<!\{)\$(?!\})", text)) >= 2 or re.search(r"\d\s*\$", text):
        text = re.sub(r"(?<!\{)\$(?!\})", "", text)
    text = spelt_out(text.strip())
    text = GROUPED.sub(lambda m: re.sub(r"[^\d]", "", m[0]), text)
    text = SIZES.sub("", SPACING.sub(" ", text)).replace("\\mathrm{e}", "e").replace("{,}", "")
    text = re.sub(r"\\([dtc]frac)", r"\\frac", text)
    for _ in range(4):
        text = WRAPPED.sub(lambda m: f" {m[1]} " if len(m[1]) > 1 else m[1], text)
    text = re.sub(r"\\(?:dots|cdots|ldots|dotsc|dotsb|dotso)|\.\.\.", r"\\ldots ", text)
    text = (
        re.sub(r"\\operatorname\*?\{(\w+)\}", r"\\\1 ", text)
        .replace("\\langle", "(")
        .replace("\\rangle", ")")
    )
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", text).replace("\\degree", "°")
    text = re.sub(r"(\d)\s*\(\s*mod\b.*$", r"\1", text)
    text = " ".join(text.split())
    while (stripped := text.strip().rstrip(".,;:").strip("*` ")) != text:
        text = stripped
    return text


def spelt_out(text: str) -> str:
    """Numbers that are written in words or in other notations."""
    text = re.sub(r"^\s*=\s*", "", text)
    text = re.sub(r"^(?:negative|minus)\s+(?=\S)", "-", text, flags=re.IGNORECASE)
    text = REPEATING.sub(_repeating, text)
    text = SCALE.sub(lambda m: f"*10^{{{UNITS_OF_TEN[m[1].lower()]}}}", text)
    text = SCIENTIFIC.sub(r"\1*10^{\2}", text)
    text = re.sub(r"(?<=\d)\s+to\s+(?=\d)", ":", text)
    sign, word = text[: text.startswith("-")], text.removeprefix("-").strip().lower()
    return sign + NUMBER_WORDS[word] if word in NUMBER_WORDS else text


def _repeating(match: re.Match[str]) -> str:
    """``0.1\\overline{6}`` is exactly (16 - 1) / 90."""
    whole, fixed, period = match[1] or "0", match[2], match[3]
    above = int(whole + fixed + period) - int(whole + fixed)
    return f"({above}/{10 ** len(fixed) * (10 ** len(period) - 1)})"
