"""Which teacher a problem goes to: by domain and sampled effort, or by the problem's own word. Source: spec/03 §1."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from k3rl.chat import Renderer
from k3rl.config.distill import TeacherConfig
from k3rl.errors import UserError, nearest
from k3rl.types import Effort, Problem

Cell = tuple[str, Effort | None]


class Routing:
    """The first teacher whose domains and efforts hold the cell teaches it; so a fallback stands last."""

    def __init__(self, teachers: Sequence[TeacherConfig]) -> None:
        self.teachers = tuple(teachers)
        self.names = [t.name or t.model.path for t in teachers]
        sources = [(t.remote or t.model).model_dump_json() for t in teachers]
        known = list(dict.fromkeys(sources))
        self.weights = [known.index(source) for source in sources]
        """By teacher, the number of its checkpoint: teachers that share one are loaded once."""

    def teacher_of(self, problem: Problem) -> int:
        """Raises `UserError` where no teacher teaches the problem's cell, or its ``teacher`` does not exist."""
        wanted = problem.metadata.get("teacher")
        if wanted is not None:
            if wanted not in self.names:
                raise UserError(
                    f"problem '{problem.id}': no teacher '{wanted}'{nearest(str(wanted), self.names)}"
                )
            return self.names.index(wanted)
        for index, teacher in enumerate(self.teachers):
            if teacher.domains and problem.domain not in teacher.domains:
                continue
            if teacher.efforts and problem.effort not in teacher.efforts:
                continue
            return index
        effort = f"effort '{problem.effort}'" if problem.effort else "no effort"
        raise UserError(
            f"teachers: nobody teaches domain '{problem.domain}' at {effort} (problem '{problem.id}')"
        )

    def check(self, problems: Iterable[Problem]) -> None:
        """Every one of these has a teacher. Raises `UserError` naming the first cell that has none."""
        for problem in problems:
            self.teacher_of(problem)


def teacher_prompt(renderer: Renderer, problem: Problem, teacher: TeacherConfig, thinking: bool) -> list[int]:
    """The prompt as this teacher was trained to read it. Responses follow it token for token, so what is scored is
    aligned from the prompts' ends, and the first sampled token follows the same generation prompt."""
    effort = teacher.reads(problem.effort)
    return renderer.encode_prompt(problem.messages, problem.tools, effort, thinking=thinking)
