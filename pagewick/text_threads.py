"""TextThreads: templates, tokenizers, grammars and images, beside the event loop. Imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from pagewick.errors import EngineDeadError

# A tokenizer releases the GIL for long texts.
_NUM_TEXT_THREADS: Final = 2
# Each may need some hundred megabytes for a large image.
_NUM_IMAGE_THREADS: Final = 2
_Result = TypeVar("_Result")


class TextThreads:
    """Runs functions in threads. Grammars and images have their own: costly ones must not hold up others' prompts."""

    def __init__(self) -> None:
        self._is_closed = False
        self._texts = ThreadPoolExecutor(_NUM_TEXT_THREADS, thread_name_prefix="text")
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._images = ThreadPoolExecutor(_NUM_IMAGE_THREADS, thread_name_prefix="images")

    async def run(
        self, function: Callable[[], _Result], *, is_grammar: bool = False, is_image: bool = False
    ) -> _Result:
        """Run a function and return its result. Raises EngineDeadError after `close`."""
        if self._is_closed:
            raise EngineDeadError("this AsyncEngine is closed; start another one")
        threads = self._grammars if is_grammar else self._images if is_image else self._texts
        return await asyncio.get_running_loop().run_in_executor(threads, function)

    def close(self) -> None:
        """Refuse further functions, and do not wait for those that run."""
        self._is_closed = True
        for threads in (self._texts, self._grammars, self._images):
            threads.shutdown(wait=False, cancel_futures=True)
