"""Byte-level BPE with tiktoken, for vocabularies where its ids equal those of tokenizers. It is
several times as fast, and while it encodes other threads run (py.detach in its src/py.rs)."""

import re
from itertools import groupby
from os.path import commonprefix
from unicodedata import category

import tiktoken

from hf.tokenizer_json import piece_pattern

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# the characters that byte-level tokens are written in, one for each byte (openai/gpt-2, encoder.py)
BYTES = dict(zip(map(chr, [*PRINTABLE, *range(256, 256 + len(OTHERS))]), PRINTABLE + OTHERS))
RUN = 50_000  # characters


class ByteLevelBPE:
    """Encodes text. pattern: a regex of its pieces. ranks: {bytes: id}. added: {id: AddedToken}.
    normalizer: a package's, or None. missing: bytes without a token."""

    def __init__(self, pattern, ranks, added, normalizer):
        self.missing = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
        self.bpe = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        self.special = {token.content for token in added.values() if token.special}
        self.added_ids = {token.content: i for i, token in added.items()}
        self.added = re.compile(any_of(set(self.added_ids)) if added else "(?!)")
        self.normalizer = normalizer

    def suits(self, text):
        """Whether tiktoken may encode a text: not with bytes that have no token, with characters so
        new that one of the packages may not know them, or with endless white space."""
        data = text.encode() if self.missing else b""
        # tiktoken panics at about a million; a run of 2 * RUN covers one of these blocks
        blocks = (text[i:i + RUN] for i in range(0, len(text) - RUN + 1, RUN))
        return (len(data) == len(data.translate(None, self.missing))
                and (text.isascii() or "Cn" not in map(category, set(text)))
                and not any(map(str.isspace, blocks)))

    def encode(self, text, match_special):
        """Text -> token ids. Added tokens that are not special are always matched."""
        ids, end = [], 0
        for match in self.added.finditer(text):
            if match_special or match[0] not in self.special:
                ids += self.encode_plain(text[end:match.start()])
                ids.append(self.added_ids[match[0]])
                end = match.end()
        return ids + self.encode_plain(text[end:])

    def encode_plain(self, text):
        if self.normalizer and not text.isascii():
            text = self.normalizer.normalize_str(text)
        return self.bpe.encode_ordinary(text)


def any_of(texts):
    """A regex that matches the longest of these texts. It branches where they differ: trying
    hundreds of texts one by one would take seconds on hostile input."""
    prefix = commonprefix([*texts])
    rest = sorted(text[len(prefix):] for text in texts)
    branches = [any_of([*same]) for first, same in groupby(rest, lambda text: text[:1]) if first]
    optional = "?" if "" in rest else ""
    return re.escape(prefix) + (f"(?:{'|'.join(branches)}){optional}" if branches else "")


def byte_level_bpe(package, spec, added):
    """The `ByteLevelBPE` of a tokenizer.json (spec) that package has read, or None where it could
    give other ids than the package. added: {id: AddedToken}."""
    normalizer = spec["normalizer"]
    pattern = piece_pattern(spec["pre_tokenizer"])
    rounds = {token.normalized for token in added.values()}  # matched before and after normalising
    strips = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
    is_known = normalizer is None or normalizer == dict(type="NFC") and True not in rounds
    if pattern is None or strips or len(rounds) > 1 or not is_known:
        return None
    ranks = ranks_of(package.model, spec["model"])
    bpe = ranks and ByteLevelBPE(pattern, ranks, added, package.normalizer)
    return None if bpe and bpe.missing and normalizer else bpe  # NFC may make a missing byte


def ranks_of(model, spec):
    """{bytes: id} of the tokens of a package's BPE model, or None if tiktoken could merge others.

    Both packages merge the pair of lowest rank, the leftmost of several: tokenizers by the order of
    its list of merges, tiktoken by the id of any token with the pair's bytes. When such a pair
    comes up, no merge has crossed its ends, so the pair also comes up when that token is encoded
    alone. If this gives the token itself, the pair is its last merge, so it is in the list."""
    if (spec.get("type") != "BPE" or spec.get("continuing_subword_prefix")
            or spec.get("end_of_word_suffix")):
        return None
    symbols = BYTES.keys() & spec["vocab"].keys()
    tokens = {token: i for token, i in spec["vocab"].items() if symbols.issuperset(token)}
    merged = [tokens.get("".join(pair).replace(" ", ""), -1) for pair in spec["merges"]]
    if -1 in merged or merged != sorted(merged):
        return None
    takes_pieces = model.ignore_merges  # a piece that is a token is not made by merges
    model.ignore_merges = False
    parts = {token: len(model.tokenize(token)) for token in tokens}
    model.ignore_merges = takes_pieces
    # A token of several parts only comes up as a whole piece. tiktoken would also merge two parts.
    if takes_pieces and 2 in parts.values():
        return None
    return {bytes(map(BYTES.get, token)): i for token, i in tokens.items()
            if takes_pieces or parts[token] == 1}
