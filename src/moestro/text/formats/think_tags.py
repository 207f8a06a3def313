"""Reasoning between `<think>` and `</think>`, where the prompt may have opened or closed it already."""

from __future__ import annotations

from collections.abc import Container
from typing import ClassVar

from moestro.text.parsing.answer_grammars import thought_rules
from moestro.text.parsing.output_parser import REASONING_PARSERS, CallStart, ReasoningParser
from moestro.text.parsing.parser_input import NAME_LIMIT, BrokenCallError, Markers, Steps


class ThinkTagsParser(ReasoningParser):
    """Parses one stretch of reasoning at the start of an answer.

    Many chat templates end the prompt with `<think>`, and with an empty stretch if the client wants no reasoning.

    Attributes:
        REASONS_FIRST: Whether an answer without tags begins with reasoning if the prompt does not say.
        ENDS_AT_CALLS: Whether a call ends reasoning that has no end tag, as in vLLM.
    """

    MARKERS = ("<think>", "</think>")
    REASONS_FIRST: ClassVar[bool] = False
    ENDS_AT_CALLS: ClassVar[bool] = True

    def steps(self) -> Steps[None]:
        """Parse the reasoning, if there is any; the rest is content."""
        is_open = self._is_open()
        if is_open is False:
            return
        start, end = self.MARKERS
        self._input.record()
        yield from self._input.skip_space()
        has_tag = bool((yield from self._input.take_if(start)))
        before = self._input.recorded()
        if not (has_tag or is_open or self.REASONS_FIRST):
            self.show(before or "")
            return
        self.begin_text(is_reasoning=True)
        calls = self.new_calls() if self.new_calls is not None and self.ENDS_AT_CALLS else None
        marks = Markers(end, *(calls.STARTS if calls is not None else ()))
        while (marker := (yield from self._input.until(marks, self.show))) not in ("", end):
            if (yield from self._has_ended_after(marker)):
                return
        if marker:
            self.begin_text(is_reasoning=False)

    def _has_ended_after(self, marker: str) -> Steps[bool]:
        """Read what follows a call's marker within the reasoning, and return whether the reasoning has ended.

        A marker before anything else is quoted. A call may be quoted too, until the answer ends without an end tag.
        """
        assert self.new_calls is not None, "markers come from its parser"
        calls, is_call = self.new_calls(), False

        def judge(text: str) -> None:
            nonlocal is_call
            for at in range(0, 0 if is_call else len(text), NAME_LIMIT):
                if parts := calls.feed(text[at : at + NAME_LIMIT]):
                    is_call = isinstance(parts[0], CallStart)
                    if not is_call:
                        raise BrokenCallError
                    return

        self._input.record()
        try:
            judge(marker)
            has_end_tag = yield from self._input.until(Markers(self.MARKERS[1]), judge)
        except BrokenCallError:
            self._input.restore()
            self.show(marker)
            return False
        text = marker + self._input.recorded().removesuffix(has_end_tag)
        if is_call and not has_end_tag and not self._input.was_cut:
            self.begin_text(is_reasoning=False)
            self.show(text)  # The next parser reads the call.
            return True
        self.show(text)
        self.begin_text(is_reasoning=False)
        return True

    @classmethod
    def end_tag(cls) -> str:
        """Return the end tag."""
        return cls.MARKERS[1]

    def thought(self, special: Container[str]) -> str:
        """Return the rules of the reasoning that the parser expects."""
        is_open = self._is_open()
        if is_open is False:
            return ""
        return thought_rules(
            *self.MARKERS, is_open=is_open or self.REASONS_FIRST, is_special=self.MARKERS[1] in special
        )

    def _is_open(self) -> bool | None:
        """Return whether the prompt has opened the reasoning (True) or closed it (False); None if it does neither."""
        start, end = self.MARKERS
        if self.continued is not None:
            return self.continued.rfind(start) > self.continued.rfind(end)
        prompt = self.prompt.rstrip()
        if prompt.endswith(start):
            return True
        return False if prompt.endswith(end) else None


@REASONING_PARSERS.register_function(
    "qwen3", "Qwen 3: `<think>` tags; without one, an answer is content.", source="Qwen3's chat template"
)
class Qwen3ReasoningParser(ThinkTagsParser):
    """Parses Qwen 3's reasoning, which `enable_thinking` turns off in the prompt."""

    TEMPLATE = ("</think>",)


@REASONING_PARSERS.register_function(
    "glm45", "GLM-4.5 to 4.7: `<think>` tags; without one, an answer is content.", source="GLM-4.5's chat template"
)
class Glm45ReasoningParser(ThinkTagsParser):
    """Parses GLM-4.5's reasoning."""

    TEMPLATE = ("</think>", "[gMASK]")


@REASONING_PARSERS.register_function(
    "deepseek_r1",
    "DeepSeek-R1: an answer is reasoning up to `</think>`, even without `<think>`.",
    source="DeepSeek-R1's chat template",
)
class DeepSeekR1ReasoningParser(ThinkTagsParser):
    """Parses DeepSeek-R1's reasoning, whose start tag the prompt or the model writes, or neither."""

    TEMPLATE = ("</think>", "<\uff5cAssistant\uff5c>")
    REASONS_FIRST = True
    ENDS_AT_CALLS = False


@REASONING_PARSERS.register_function(
    "mistral",
    "Magistral, Ministral 3: `[THINK]` tags, which are special tokens.",
    source="mistral-common, tokenizer v13",
)
class MistralReasoningParser(ThinkTagsParser):
    """Parses Mistral's reasoning. Answers that a grammar limits have none: the notation cannot name these tokens."""

    MARKERS = TEMPLATE = ("[THINK]", "[/THINK]")
    ENDS_AT_CALLS = False

    def thought(self, special: Container[str]) -> str:
        """Return no rules."""
        return ""
