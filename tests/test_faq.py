"""Every message in the FAQ is still one that the program prints.

Messages are put together in the source from texts and values. So what is left of one, once the
texts of the source are taken out, may be values (numbers, names, paths), but no sentence.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")
MESSAGES = [block.strip() for block in re.findall(r"^```\n(.*?)^```$", PAGE, re.S | re.M)]
NOT_OURS = "Cannot pickle files that are not opened for reading"  # cloudpickle's


def texts() -> list[str]:
    """The texts in the source, cut where a value is filled in or a line ends, the longest first."""
    found: set[str] = {NOT_OURS}
    for path in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(line.strip() for line in node.value.split("\n"))
    return sorted((t for t in found if len(t) >= 6 and t in PAGE), key=len, reverse=True)


TEXTS = texts()


def strange_words(message: str) -> list[str]:
    """The sentences in a message that are not in the source: three words or more."""
    for text in TEXTS:
        message = message.replace(text, "|")
    return re.findall(r"[a-z]+(?:[ ,:;]+[a-z]+){2,}", message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message[:40])
def test_a_message_in_the_faq_is_printed(message: str) -> None:
    assert not strange_words(message)


def test_a_sentence_that_is_not_printed_is_found() -> None:
    message = MESSAGES[1].replace("so the training would never end", "which is no good idea")
    assert strange_words(message)
