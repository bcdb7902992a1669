"""A response of 100 tokens per second on a phone: how often the page renders, and which nodes stay.

`python -m pytest tests/page/test_streaming.py -s` also prints how long rendering takes. No test asserts times.
"""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import ViewportSize, expect

from tests.page.conftest import NewPage
from tests.page.driver import answers, ask, text_of, wait_until_finished
from tests.page.stand_in import Answer, StandIn

SECTION = r"""## Step {number}

The *sum* of the first $n$ numbers is \(\frac{{n(n+1)}}{{2}}\); it costs $5 or **more**, see [the page](https://example.org/{number}).

$$
\sum_{{i=1}}^{{n}} i = \frac{{n(n+1)}}{{2}}
$$

```python
def total(n: int) -> int:
    '''The sum of the first n numbers.'''
    result = 0
    for i in range(1, n + 1):
        result += i  # one after the other
    return result
```

| n | sum | formula |
|--:|:---:|---|
| 1 | `1` | $1$ |
| 10 | `55` | $\frac{{10 \cdot 11}}{{2}}$ |
| 100 | `5050` | $\frac{{100 \cdot 101}}{{2}}$ |

- first, count
  1. with *care*
  2. with `code`
- then, add $x_{{{number}}}$

"""
TEXT = "".join(SECTION.format(number=number) for number in range(1, 4))
# Tokens have about four characters.
PIECES = [TEXT[at : at + 4] for at in range(0, len(TEXT), 4)]
PHONE = ViewportSize(width=390, height=844)

WATCH_RENDERING = """async () => {
  const { MarkdownView } = await import("/page/markdown.js");
  const seen = window.seen = { renders: [], frames: [], longTasks: [], firstNodes: [], replaced: 0 };
  const update = MarkdownView.prototype.update;
  MarkdownView.prototype.update = function (text, isComplete) {
    const begun = performance.now();
    update.call(this, text, isComplete);
    seen.renders.push({ frame: seen.frames.length, ms: performance.now() - begun, isComplete });
    const nodes = [...this.element.children];
    // The last block may still turn out to be part of the one before it.
    nodes.slice(0, -2).forEach((node, index) => {
      seen.firstNodes[index] ??= node;
      if (seen.firstNodes[index] !== node) seen.replaced += 1;
    });
  };
  const nextFrame = (now) => {
    seen.frames.push(now);
    requestAnimationFrame(nextFrame);
  };
  requestAnimationFrame(nextFrame);
  new PerformanceObserver((list) => seen.longTasks.push(...list.getEntries().map((task) => task.duration)))
    .observe({ type: "longtask" });
}"""


def test_streams_smoothly_on_a_phone(new_page: NewPage, stand_in: StandIn) -> None:
    page = new_page(viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 4})
    page.evaluate(WATCH_RENDERING)
    stand_in.answers = [Answer(PIECES, pause_s=0.01)]
    ask(page, "How do I add numbers?")
    expect(answers(page)).to_have_count(1)
    wait_until_finished(page)
    seen = page.evaluate("seen")
    print(f"\n{json.dumps(summary(seen))}")
    while_writing = [render["frame"] for render in seen["renders"] if not render["isComplete"]]
    assert len(while_writing) > 20
    assert len(while_writing) == len(set(while_writing)), "two renders in one frame"
    assert seen["replaced"] == 0
    shown = text_of(answers(page).last)
    expect(shown.locator("figure.code")).to_have_count(3)
    expect(shown.locator("table math")).to_have_count(9)
    expect(shown.locator(".formula.display")).to_have_count(3)
    expect(shown.locator("li")).to_have_count(12)
    expect(shown).not_to_contain_text("$n$")
    expect(shown).to_contain_text("it costs $5 or more")


def summary(seen: dict[str, Any]) -> dict[str, float]:
    """Return the numbers that docs/chat-page.md quotes, in milliseconds and characters."""
    renders = sorted(render["ms"] for render in seen["renders"])
    gaps = [after - before for before, after in zip(seen["frames"], seen["frames"][1:], strict=False)]
    return {
        "characters": len(TEXT),
        "renders": len(renders),
        "median_render": round(renders[len(renders) // 2], 1),
        "longest_render": round(renders[-1], 1),
        "longest_frame_gap": round(max(gaps), 1),
        "longest_task": round(max(seen["longTasks"], default=0), 1),
    }
