"""Where the answer is: the text after the thinking, and the last box in it."""

THINK_END = "</think>"
RESPONSE_MARK = "###Response"
BOX = "\\boxed"
BOX_OPEN = "\\boxed{"


def solution_segment(response: str) -> str | None:
    """The text after the last `</think>`, else the segment after the first `###Response`, else None."""
    if THINK_END in response:
        return response.rsplit(THINK_END, 1)[1]
    if RESPONSE_MARK in response:
        return response.split(RESPONSE_MARK, 2)[1]
    return None


def text_for_math_verify(response: str) -> str:
    """What math-verify gets to see: the segment of `solution_segment`, else the whole response."""
    segment = solution_segment(response)
    return response if segment is None else segment


def last_box(text: str) -> str | None:
    """The inside of the last `\\boxed{...}` of `text`, braces matched; None when there is none.

    Only the last `\\boxed` counts: when it has no brace right after it (`\\boxed 5`) or is never closed, an earlier
    one is not tried, and `\\fbox` is no box. One pass, no regular expression: the text may be megabytes long.
    """
    start = text.rfind(BOX)
    if start < 0 or not text.startswith(BOX_OPEN, start):
        return None
    inside = start + len(BOX_OPEN)
    depth, position = 1, inside
    while True:
        close = text.find("}", position)
        if close < 0:
            return None
        depth += text.count("{", position, close) - 1
        if depth == 0:
            return text[inside:close]
        position = close + 1
