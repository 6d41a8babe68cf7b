"""In which language is a text? By its letters' script, and for Latin script by the commonest little words.

Good enough to tell a response that slips into another language; no identifier of rare languages.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from rewards.api import GraderError, Score, Scored, reward

SCRIPTS = {
    "zh": ("CJK",), "ja": ("HIRAGANA", "KATAKANA", "CJK"), "ko": ("HANGUL",), "ru": ("CYRILLIC",),
    "uk": ("CYRILLIC",), "bg": ("CYRILLIC",), "ar": ("ARABIC",), "fa": ("ARABIC",), "ur": ("ARABIC",),
    "he": ("HEBREW",), "el": ("GREEK",), "hi": ("DEVANAGARI",), "mr": ("DEVANAGARI",), "ne": ("DEVANAGARI",),
    "bn": ("BENGALI",), "ta": ("TAMIL",), "te": ("TELUGU",), "kn": ("KANNADA",), "gu": ("GUJARATI",),
    "pa": ("GURMUKHI",), "th": ("THAI",),
}  # fmt: skip
"""Scripts by language code; a language that is not listed is written in Latin letters."""

LITTLE_WORDS = {
    "en": "the of and to in is that it for was on are with as be this have from not you we which so if then "
    "there can has but or by an at what when they",
    "de": "der die das und ist nicht ein eine zu den von mit sich auf für im dem auch es an werden aus er hat dass "
    "sie nach wird bei wir ich also wenn sind",
    "fr": "le la les de des et est un une du que qui dans en pour pas sur au avec il ce se sont par plus nous "
    "vous mais ou donc cette elle",
    "es": "el la los las de y que en un una es por con para del se no lo como más pero su al está son este si "
    "porque entonces hay",
    "pt": "o a os as de e que do da em um uma é para com não no na por mais se como dos mas ao ele das isso são "
    "então está",
    "it": "il lo la gli di e che è un una in per con non del della sono si le dei come ma anche più questo nel "
    "quindi alla",
    "nl": "de het een en van is dat in te op zijn met voor niet aan er om ook als dan maar bij uit naar wordt "
    "dus deze we",
    "pl": "i w na z się nie do to jest że jak o ale po co za od tak są przez dla czy oraz więc który",
    "sv": "och att det som en på är av för med den till inte om ett har jag vi så kan men eller då",
    "tr": "ve bir bu için ile de da ne çok daha gibi olarak olan ama mi kadar sonra en değil her o ki",
    "vi": "và của là có không một được cho với các này trong để người đó khi những như thì nếu vì",
    "id": "yang dan di ini itu dengan untuk dari pada tidak adalah ke dalam akan juga atau kita maka oleh",
}
WORDS = {code: frozenset(words.split()) for code, words in LITTLE_WORDS.items()}
CODE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]|https?://\S+", re.DOTALL
)
LETTERS = re.compile(r"[^\W\d_]+")


def script_of(character: str) -> str:
    """First word of the character's name: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(character, "UNKNOWN").split(" ")[0].split("-")[0]


def prose(text: str) -> str:
    """The text without code, formulas and addresses, which have no language."""
    return CODE.sub(" ", text)


def script_share(text: str, language: str) -> float | None:
    """Share of a text's letters that are in the language's script; `None` for a text without letters."""
    counts = Counter(script_of(c) for word in LETTERS.findall(prose(text)) for c in word)
    total = sum(counts.values())
    if total == 0:
        return None
    return sum(counts[s] for s in SCRIPTS.get(language, ("LATIN",))) / total


def latin_language(text: str) -> str | None:
    """The likeliest language of a text in Latin letters, `None` where too few of its little words were seen."""
    words = [w.casefold() for w in LETTERS.findall(prose(text))]
    hits = {code: sum(w in known for w in words) for code, known in WORDS.items()}
    (best, most), (_, next_most) = Counter(hits).most_common(2)
    return best if most >= 3 and most > next_most else None


def guess_language(text: str) -> str | None:
    """Language code of a text; `None`: not known."""
    counts = Counter(script_of(c) for word in LETTERS.findall(prose(text)) for c in word)
    if not counts:
        return None
    if counts["HIRAGANA"] + counts["KATAKANA"] > 0.1 * sum(counts.values()):
        return "ja"
    script = counts.most_common(1)[0][0]
    if script == "LATIN":
        return latin_language(text)
    return next((code for code, scripts in SCRIPTS.items() if script in scripts), None)


def consistency(text: str, language: str) -> float:
    """How much of a text is in a language, 0 to 1: by script; and 0 for Latin text that reads as another
    language. Texts without letters are in any language."""
    share = script_share(text, language)
    if share is None:
        return 1.0
    found = latin_language(text) if language not in SCRIPTS else None
    return 0.0 if found is not None and language in WORDS and found != language else share


@reward(name="language", depends="response", deterministic=True)
def language(
    scored: Scored,
    language: str | None = None,
    channels: list[str] | None = None,
    at_least: float | None = None,
) -> Score:
    """How much of the response is in one language: ``language`` (a two-letter code), else the question's.

    ``channels``: of ``think`` and ``response``, both by default; the value is the least of theirs. ``at_least``
    makes it 1 or 0. Code, formulas and addresses do not count.
    """
    wanted = language or guess_language(scored.question) or "en"
    if not re.fullmatch(r"[a-z]{2}", wanted):
        raise GraderError(f"the language '{wanted}' is not a two-letter code")
    texts = {"think": scored.reasoning, "response": scored.content}
    unknown = set(channels or ()) - set(texts)
    if unknown:
        raise GraderError(f"there is no channel {sorted(unknown)}: name 'think' or 'response'")
    shares = {name: consistency(texts[name], wanted) for name in channels or texts}
    value = min(shares.values())
    return Score(value if at_least is None else float(value >= at_least), shares, f"asked for '{wanted}'")
