"""Instructions whose following can be checked, by the names and arguments that IFEval's data sets give them."""

from __future__ import annotations

import re
from collections.abc import Callable

from rewards.api import GraderError
from rewards.verifiers.extract import fences
from rewards.verifiers.json_schema import NotJson, read_json
from rewards.verifiers.language import consistency

Check = Callable[..., bool]
KINDS: dict[str, Check] = {}

ABBREVIATIONS = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Fig|approx|[A-Z])\.(?=\s)")
SENTENCE = re.compile(r"[^.!?。！？]+(?:[.!?。！？]+[\"')\]]*(?=\s|$)|[.!?。！？]|$)")


def kind(name: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        KINDS[name] = check
        return check

    return add


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+(?:['’\-][^\W_]+)*", text)


def sentences(text: str) -> list[str]:
    """Pieces that end in a mark; abbreviations, initials and decimals do not end one."""
    text = ABBREVIATIONS.sub(lambda m: m[0][:-1], re.sub(r"(?<=\d)\.(?=\d)", ",", text))
    return [s for s in (m.strip() for m in SENTENCE.findall(text)) if re.search(r"\w", s)]


def related(count: int, relation: str | None, wanted: int | None) -> bool:
    """``at least`` (the default), ``less than``, and their like."""
    if wanted is None:
        raise GraderError("an instruction that counts needs its number")
    match (relation or "at least").lower():
        case "at least":
            return count >= wanted
        case "less than":
            return count < wanted
        case "at most":
            return count <= wanted
        case "more than":
            return count > wanted
        case "exactly" | "equal to":
            return count == wanted
    raise GraderError(f"'{relation}' is none of: at least, less than, at most, more than, exactly")


def occurrences(text: str, phrase: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE))


@kind("keywords:existence")
def _existence(text: str, keywords: list[str]) -> bool:
    return all(occurrences(text, k) for k in keywords)


@kind("keywords:forbidden_words")
def _forbidden(text: str, forbidden_words: list[str]) -> bool:
    return not any(occurrences(text, k) for k in forbidden_words)


@kind("keywords:frequency")
def _frequency(text: str, keyword: str, frequency: int, relation: str | None = None) -> bool:
    return related(occurrences(text, keyword), relation, frequency)


@kind("keywords:letter_frequency")
def _letters(text: str, letter: str, let_frequency: int, let_relation: str | None = None) -> bool:
    return related(text.lower().count(letter.lower()), let_relation, let_frequency)


@kind("language:response_language")
def _language(text: str, language: str) -> bool:
    return bool(text.strip()) and consistency(text, language[:2].lower()) >= 0.9


@kind("length_constraints:number_words")
def _number_words(text: str, num_words: int, relation: str | None = None) -> bool:
    return related(len(words(text)), relation, num_words)


@kind("length_constraints:number_sentences")
def _number_sentences(text: str, num_sentences: int, relation: str | None = None) -> bool:
    return related(len(sentences(text)), relation, num_sentences)


def divided(text: str, divider: str) -> list[str]:
    return [p.strip() for p in re.split(divider, text) if p.strip()]


@kind("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs divided by ``***``."""
    return len(divided(text, r"\s?\*\*\*\s?")) == num_paragraphs


@kind("length_constraints:nth_paragraph_first_word")
def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs divided by an empty line."""
    paragraphs = divided(text, r"\n[ \t]*\n")
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    return (words(paragraphs[nth_paragraph - 1]) or [""])[0].lower() == first_word.lower()


@kind("detectable_content:number_placeholders")
def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


@kind("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str = "P.S.") -> bool:
    marker = r"\.?\s?".join(re.escape(c) for c in postscript_marker.replace(".", "").replace(" ", ""))
    return re.search(rf"^\W*{marker}\.?(?!\w)", text, re.IGNORECASE | re.MULTILINE) is not None


@kind("detectable_format:number_bullet_lists")
def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-(?!-))\s*\S", text, re.MULTILINE)) == num_bullets


@kind("detectable_format:constrained_response")
def _one_of(text: str, options: list[str] | None = None) -> bool:
    choices = options or ["My answer is yes.", "My answer is no.", "My answer is maybe."]
    return any(text.strip() == c.strip() for c in choices)


@kind("detectable_format:number_highlighted_sections")
def _highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*[^*\n]*[^*\s][^*\n]*\*\*", text)
    single = re.findall(
        r"(?<!\*)\*[^*\n]*[^*\s][^*\n]*\*(?!\*)", re.sub(r"^\s*\*(?=\s)", "", text, flags=re.MULTILINE)
    )
    return len(double) + len(single) >= num_highlights


@kind("detectable_format:multiple_sections")
def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"\b{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


@kind("detectable_format:json_format")
def _json(text: str) -> bool:
    blocks = fences(text.strip())
    whole = not blocks or text.strip().startswith("```")
    try:
        read_json(text, "fence")
    except NotJson:
        return False
    return whole


@kind("detectable_format:title")
def _title(text: str) -> bool:
    return any(t.strip() for t in re.findall(r"<<([^<>\n]+)>>", text))


@kind("combination:two_responses")
def _two(text: str) -> bool:
    parts = [p.strip() for p in text.split("******")]
    inner = [p for p in parts if p]
    return len(inner) == 2 and all(p for p in parts[1:-1]) and inner[0] != inner[1]


@kind("combination:repeat_prompt")
def _repeat(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@kind("startend:end_checker")
def _ends(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@kind("startend:quotation")
def _quotation(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] in '"“' and bare[-1] in '"”'


@kind("change_case:capital_word_frequency")
def _capital_words(text: str, capital_frequency: int, capital_relation: str | None = None) -> bool:
    return related(sum(w.isupper() for w in words(text)), capital_relation, capital_frequency)


@kind("change_case:english_capital")
def _capital(text: str) -> bool:
    return text.isupper() and consistency(text.lower(), "en") >= 0.9


@kind("change_case:english_lowercase")
def _lowercase(text: str) -> bool:
    return text.islower() and consistency(text, "en") >= 0.9


@kind("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return not re.search("[,，、]", text)
