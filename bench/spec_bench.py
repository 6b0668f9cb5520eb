"""Converts Spec-Bench's questions to chats for `python -m bench`:

    python -m bench.spec_bench question.jsonl spec_bench.jsonl

Keeps first turns. The kinds alternate, and hashes draw the order in each, so that the first 96
chats are 16 of each of the six kinds."""

import hashlib
import json
import sys
from itertools import zip_longest
from pathlib import Path

KINDS = "mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"


def convert(lines):
    """Lines of question.jsonl ("question_id", "category", "turns") -> lines of chats. MT-Bench's
    questions have categories of its own."""
    questions = {kind: [] for kind in KINDS}
    for question in map(json.loads, lines):
        kind = question["category"] if question["category"] in KINDS else KINDS[0]
        questions[kind].append(question["turns"][0])
    drawn = [sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
             for texts in questions.values()]
    return [json.dumps(dict(kind=kind, messages=[dict(role="user", content=text)])) + "\n"
            for row in zip_longest(*drawn) for kind, text in zip(KINDS, row) if text is not None]


def main(source, target):
    with open(source, encoding="utf-8") as file:
        Path(target).write_text("".join(convert(file)), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
