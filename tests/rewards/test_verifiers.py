"""The verifiers other than mathematics and code, each on answers that are right, wrong and awkward."""

from __future__ import annotations

import random
import time

import pytest
from reward_helpers import RENDERER, make_group, make_problem

from k3rl.config.rewards import RewardConfig
from k3rl.types import Author, Channel, Outcome, Segment
from rewards.api import GraderError, Scored
from rewards.calls import call_reward
from rewards.registry import get_reward
from rewards.verifiers.choice import chosen
from rewards.verifiers.constraint_kinds import KINDS, sentences
from rewards.verifiers.constraints import followed
from rewards.verifiers.extract import extract, fences, tagged
from rewards.verifiers.language import guess_language
from rewards.verifiers.math import judge
from rewards.verifiers.math_extract import boxes
from rewards.verifiers.repetition import repeated_share
from rewards.worker import RewardWorker, scored_view


def view(content: str, think: str = "1", question: str = "3+5=") -> Scored:
    problem = make_problem()
    problem.messages[0]["content"] = question
    group = make_group([content], problem, think=think)
    return scored_view(problem, group.trajectories[0], RENDERER)


def value(
    name: str, content: str, thought: str = "1", question: str = "3+5=", **arguments
) -> float | Outcome:
    """The value in this process, or why there is none."""
    reward = get_reward(name)
    ((verdict,),) = call_reward(reward, [view(content, thought, question)], reward.bind(arguments))
    return verdict.score.value if verdict.score else verdict.outcome


CHOICES = [
    ("B", True), ("(B)", True), ("B.", True), ("b", True), (r"\boxed{B}", True), (r"\boxed{\text{(B)}}", True),
    ("The answer is B.", True), ("The answer is (B) because A is too small.", True), ("**Answer:** B", True),
    ("Answer: B) 12", True), ("A is wrong, C is wrong.\nB", True), ("It must be (B).", True),
    ("<answer>B</answer>", True),
    ("Option B", True), ("I think the correct choice is **B**.", True), ("twelve", True),
    ("The answer is twelve.", True),
    ("A", False), ("The answer is A, not B.", False), ("A good question. Answer: C", False), ("", False),
    ("either A or B", False), ("Both (A) and (B) hold.", False), ("<answer>C</answer> B", False), ("Because", False),
    ("The answer is a number.", False), ("Bananas", False), (r"First \boxed{B}, no: \boxed{C}", False),
]  # fmt: skip


@pytest.mark.parametrize(("content", "right"), CHOICES)
def test_multiple_choice_reads_the_letter_that_was_settled_on(content, right):
    choices = ["ten", "twelve", "ninety", "zero"]
    assert value("multiple_choice", content, answer="B", choices=choices) == float(right)
    assert value("multiple_choice", content, answer=1, choices=choices) == float(right)


def test_several_letters_must_all_be_chosen():
    for content, right in [
        ("A, C", 1.0),
        ("A and C", 1.0),
        ("Answer: A, C and D", 0.0),
        ("AC", 1.0),
        ("A", 0.0),
    ]:
        assert value("multiple_choice", content, answer="AC") == right
    assert value("multiple_choice", "A", answer="Z") is Outcome.GRADER_FAILED
    assert value("multiple_choice", "A", answer=99) is Outcome.GRADER_FAILED
    assert chosen("nothing of the kind", "ABCD", None, False) == set()


@pytest.mark.parametrize(
    ("content", "answer", "arguments", "right"),
    [
        ("42", 42, {}, True),
        ("it is 1,234.50", "1234.5", {}, True),
        ("41 then 42", 42, {}, True),
        ("41 then 42", 41, {"extract_from": "first_number"}, True),
        ("3.1416", 3.14159, {"relative": 1e-5}, True),
        ("3.142", 3.14159, {"relative": 1e-5}, False),
        ("99.96", 100, {"absolute": 0.05}, True),
        ("99.9", 100, {"absolute": 0.05}, False),
        ("−7", -7, {}, True),
        ("1e-3", "0.001", {}, True),
        ("none", 3, {}, False),
        ("9" * 5000, 3, {}, False),
        ("0.1", "1/10", {}, True),
    ],
)
def test_numbers_within_a_tolerance(content, answer, arguments, right):
    assert value("numeric", content, answer=answer, **arguments) == float(right)


def test_texts_equal_contained_or_matching():
    assert value("exact", " Paris \n", answer="Paris") == 1.0
    assert value("exact", "paris", answer=["Rome", "Paris"], case_sensitive=False) == 1.0
    assert value("exact", "Paris.", answer="Paris") == 0.0
    assert value("exact", "Paris.", answer="Paris", punctuation=False) == 1.0
    assert value("contains", "from Paris to Rome", answer=["rome", "oslo"]) == 0.5
    assert value("contains", "Romeo", answer="rome") == 0.0
    assert value("regex", "id-1234", pattern=r"id-\d{4}", whole=True) == 1.0
    assert value("regex", "an id-1234", pattern=r"id-\d{4}", whole=True) == 0.0
    assert value("regex", "x", pattern="(") is Outcome.GRADER_FAILED


def test_a_pattern_that_takes_for_ever_times_out():
    worker = RewardWorker(RewardConfig(timeout_s=1.0, retries=0), RENDERER)
    try:
        problem = make_problem("r", {"name": "regex", "pattern": r"(a+)+$"})
        bad, good = worker.score(make_group(["a" * 40 + "!", "aaa"], problem))
        assert (bad.outcome, good.total) == (Outcome.TIMED_OUT, 1.0)
    finally:
        worker.close()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Sure:\n```json\n{"name": "Ada"}\n```', 1.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": true}', 0.0),
        ('{"name": "Ada", "name": "Eve"}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada"} and more', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_of_a_shape(content, expected):
    assert value("json_schema", content, schema=SCHEMA) == expected


def test_a_schema_that_is_none_or_that_looks_elsewhere_is_the_graders_failure():
    for schema in ({"type": "nothing"}, "not json", {"$ref": "http://127.0.0.1:9/schema.json"}):
        assert value("json_schema", "{}", schema=schema) is Outcome.GRADER_FAILED
    assert value("json_schema", '{"a": [1, 2]}', answer={"a": [1, 2]}) == 1.0
    assert value("json_schema", '{"a": [2, 1]}', answer='{"a": [1, 2]}') == 0.0


THREE = "One fish. Two fish! Red fish?"
FOLLOWED = [
    ("keywords:existence", {"keywords": ["fish", "red"]}, THREE, "One fish."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "concatenate", "the cat sat"),
    ("keywords:frequency", {"keyword": "fish", "frequency": 3, "relation": "at least"}, THREE, "fish fish"),
    ("keywords:frequency", {"keyword": "fish", "frequency": 3, "relation": "less than"}, "fish fish", THREE),
    ("keywords:letter_frequency", {"letter": "f", "let_frequency": 3, "let_relation": "at least"}, THREE, "fish"),
    ("language:response_language", {"language": "ru"}, "Это ответ на ваш вопрос.", "This is the answer."),
    ("language:response_language", {"language": "fr"}, "Le chat est dans la maison et il dort.",
     "The cat is in the house and it is asleep."),
    ("length_constraints:number_words", {"num_words": 6, "relation": "at least"}, THREE, "One fish."),
    ("length_constraints:number_sentences", {"num_sentences": 4, "relation": "less than"},
     THREE, THREE + " Blue fish."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "two"},
     "One.\n\nTwo.", "Two.\n\nOne."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [street]", "[name] of []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. more", "Bye. Tops."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\n\nP.P.S more", "Bye.\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n- c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     "Section 1\na\nSection 2\nb", "Section 1"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "a: 1"),
    ("detectable_format:json_format", {}, '{"a": 1}', 'Here:\n```json\n{"a": 1}\n```'),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<<>> text"),
    ("combination:two_responses", {}, "first\n******\nsecond", "same\n******\nsame"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "That is all."}, "Fish. That is all.", "That is all. Fish."),
    ("startend:quotation", {}, '"Fish."', 'Fish."'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "BIG RED fish", "BIG fish"),
    ("change_case:english_capital", {}, "THIS IS THE FISH", "This is the fish"),
    ("change_case:english_lowercase", {}, "this is the fish", "This is the fish"),
    ("punctuation:no_comma", {}, "one fish", "one, two"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), FOLLOWED)
def test_an_instruction_is_followed_or_not(name, arguments, good, bad):
    assert followed(name, arguments, [good])
    assert not followed(name, arguments, [bad])


def test_every_kind_of_instruction_has_a_case():
    assert {name for name, *_ in FOLLOWED} == set(KINDS)
    assert len(KINDS) == 25


def test_constraints_together_by_share_and_loosely():
    ids, kwargs = (
        ["punctuation:no_comma", "keywords:existence"],
        [{"num_words": None}, {"keywords": ["fish"]}],
    )
    arguments = {"instruction_id_list": ids, "kwargs": kwargs}
    assert value("constraints", "red fish", **arguments) == 1.0
    assert value("constraints", "red, fish", **arguments) == 0.0
    assert value("constraints", "red, fish", credit="share", **arguments) == 0.5
    assert value("constraints", "Sure, here:\nfish", loose=True, **arguments) == 1.0
    assert value("constraints", "", credit="share", **arguments) == 0.0
    assert value("constraints", "x", instruction_id_list=["keywords:existance"]) is Outcome.GRADER_FAILED
    with pytest.raises(GraderError, match="did you mean 'keywords:existence'"):
        followed("keywords:existance", {}, ["x"])


def test_sentences_do_not_end_at_abbreviations_and_decimals():
    assert len(sentences("Dr. Ada met J. Lee. They ate 3.5 pies! Why?")) == 3


TEXTS = {
    "en": "This is the answer that you have asked for and it is not long.",
    "de": "Das ist die Antwort und sie ist nicht lang, weil wir auch noch andere haben.",
    "fr": "Voici la réponse que vous avez demandée, elle est dans le livre et pas sur la table.",
    "es": "Esta es la respuesta que has pedido y no es muy larga porque los demás están aquí.",
    "zh": "这是你要的答案，它并不长。",
    "ja": "これはあなたが求めた答えです。",
    "ko": "이것은 당신이 요청한 답변입니다.",
    "ru": "Это ответ, который вы просили.",
    "ar": "هذا هو الجواب الذي طلبته.",
}


@pytest.mark.parametrize("code", TEXTS)
def test_languages_are_told_apart(code):
    assert guess_language(TEXTS[code]) == code
    assert value("language", TEXTS[code], thought=TEXTS[code], question=TEXTS[code]) > 0.95
    other = TEXTS["ru" if code == "en" else "en"]
    assert value("language", TEXTS[code], thought=other, question=TEXTS[code]) < 0.2
    assert value("language", TEXTS[code], thought=other, question=TEXTS[code], channels=["response"]) > 0.95


def test_code_and_formulas_have_no_language():
    text = "这是答案：`print('the answer to all of it')` $x + y = z$"
    assert value("language", text, thought="", language="zh") == 1.0
    assert value("language", "12 + 3 = 15", thought="", language="ru") == 1.0
    assert value("language", "x", language="russian") is Outcome.GRADER_FAILED


def test_repetition_counts_ngrams_that_came_before():
    rng = random.Random(3)
    tokens = [rng.randrange(50) for _ in range(300)]
    for n in (1, 3, 8):
        seen, again = set(), 0
        for i in range(len(tokens) - n + 1):
            gram = tuple(tokens[i : i + n])
            again += gram in seen
            seen.add(gram)
        assert repeated_share(tokens, n) == pytest.approx(again / (len(tokens) - n + 1))
    assert repeated_share([1, 2, 3], 8) == 0.0
    assert value("repetition", "ab" * 60, thought="once", channel="response") < 0.1
    assert value("repetition", "ab" * 60, thought="once", channel="think") == 1.0
    assert value("repetition", "x", unit="sentence") is Outcome.GRADER_FAILED
    group = make_group(["8"])
    said_to_it = Segment(Author.ENVIRONMENT, Channel.OBSERVATION, [7] * 200)
    group.trajectories[0].segments.append(said_to_it)
    heard = scored_view(group.problem, group.trajectories[0], RENDERER)
    assert get_reward("repetition").function(heard) == 1.0  # the environment's repeats are not the policy's
    assert value("repetition", "to be or not " * 30, unit="word", n=4, channel="response") < 0.1
    assert value("repetition", "each word here differs", unit="word", n=4, channel="response") == 1.0


def test_format_of_channels():
    assert value("xtml_format", "8", thought="") == 1.0
    assert value("xtml_format", "8", thought="", think=True) == 0.0
    assert value("xtml_format", "8", thought="why", think=True) == 1.0
    assert value("xtml_format", "") == 0.0
    assert get_reward("xtml_format").function(view(""), content=False).value == 1.0
    group = make_group(["8", "8"])
    cut = group.trajectories[1].segments[-1]
    cut.token_ids, cut.logprobs = [], []
    views = [scored_view(group.problem, t, RENDERER) for t in group.trajectories]
    whole, unclosed = (get_reward("xtml_format").function(v) for v in views)
    assert (whole.value, unclosed.value, unclosed.components["closed"]) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "task", ["chain_sum", "basic_arithmetic", "leg_counting", "spell_backward", "number_sorting"]
)
def test_reasoning_gym_scores_its_own_answers(task):
    import reasoning_gym

    arguments = {"seed": 5, "size": 3}
    dataset = reasoning_gym.create_dataset(task, **arguments)
    for index in range(3):
        common = {"task": task, "arguments": arguments, "index": index, "answer": dataset[index]["answer"]}
        assert value("reasoning_gym", dataset[index]["answer"], **common) == 1.0
        assert value("reasoning_gym", "surely not", **common) < 0.5
        assert value("reasoning_gym", "x", **{**common, "answer": "another"}) is Outcome.GRADER_FAILED


LOOPS = [
    "\\boxed{",
    "<answer>",
    "\\[",
    "```\n",
    "```x\n",
    "The answer is ",
    "1,111",
    "$",
    "(",
    "a b ",
    "{",
    "\\{",
    "\\(",
]


@pytest.mark.parametrize("piece", LOOPS)
def test_a_policy_that_loops_costs_little_time(piece):
    text = piece * (200_000 // len(piece))
    start = time.perf_counter()
    judge("7", text)
    for how in ("last_number", "first_number", "answer_tag", "last_line"):
        extract(text, how)
    chosen(text, "ABCD", ["one", "two"], False)
    fences(text)
    assert time.perf_counter() - start < 3.0


def test_boxes_and_tags_are_matched():
    assert boxes(r"\boxed{\frac{1}{2}} then \fbox{ {3} }") == [r"\frac{1}{2}", "{3}"]
    assert boxes(r"\boxed{\boxed{5}}")[-1] == "5"
    assert boxes(r"\boxed{5") == []
    assert boxes(r"} \boxed{a\}b}") == [r"a\}b"]
    assert tagged("<ANSWER>1</ANSWER> <answer>2</answer> <answer>3") == ["1", "2"]
    assert fences("```python\nx\n```\ntext\n```\ny\n``` ") == [("python", "x"), ("", "y")]


def test_all_built_in_rewards_can_be_found_and_say_what_they_do():
    from rewards.registry import BUILT_IN

    for name in BUILT_IN:
        assert get_reward(name).doc, name
