"""Makes the tokenizer.json of a vocabulary in a GGUF file, and knows how tokenizers split text."""

from common.values import one_of

# ByteLevel's own pattern, GPT-2's, and the same after Digits, which makes each digit a piece.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# Patterns of the Split step before ByteLevel. Qwen's splits numbers into single digits.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_PATTERN = LLAMA3_PATTERN.replace("{1,3}", "")
QWEN35_PATTERN = QWEN_PATTERN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
# GPT-4o and Mistral's tekken also split between a lower-case and an upper-case letter.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN_PATTERN = GPT4O_PATTERN.replace(ENDING, "").replace("{1,3}", "")
LLAMA_CPP_PATTERNS = (  # its default: each splits the pieces of the one before
    r"[\p{P}$+<=>^~|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")
CODE_PATTERN = (  # demo/'s: newlines are not joined to punctuation, as prompts end with a colon
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
PATTERNS = LLAMA3_PATTERN, QWEN_PATTERN, QWEN35_PATTERN, GPT4O_PATTERN, TEKKEN_PATTERN, CODE_PATTERN
DIGITS = dict(type="Digits", individual_digits=True)
PIECE_IS_TOKEN = "llama-bpe", "llama-v3", "llama3", "tekken"  # pieces that are tokens skip merges
NORMALISED = "qwen2", "deepseek-r1-qwen", "qwen35"  # to NFC first, as in their tokenizer.json
SPLITS = {  # tokenizer.ggml.pre -> pattern, patterns, or a step before ByteLevel
    "default": LLAMA_CPP_PATTERNS, "gpt-2": None, "smollm": DIGITS, "gpt-4o": GPT4O_PATTERN,
    **dict.fromkeys(NORMALISED, QWEN_PATTERN), "qwen35": QWEN35_PATTERN,
    **dict.fromkeys((*PIECE_IS_TOKEN, "dbrx", "smaug-bpe"), LLAMA3_PATTERN),
    "tekken": TEKKEN_PATTERN}
END_TOKENS = (  # those that end generation in llama.cpp, whatever a file says about them
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>")
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)


def split_steps(split):
    """The pre_tokenizer steps of a tokenizer.json. split: a value of SPLITS."""
    if isinstance(split, str | tuple):
        steps = [dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
                 for pattern in ([split] if isinstance(split, str) else split)]
        return [*steps, BYTE_LEVEL | dict(use_regex=False)]
    return [split, BYTE_LEVEL] if split else [BYTE_LEVEL]


def piece_pattern(pre_tokenizer):
    """A regex whose matches are the pieces of a tokenizer.json's byte-level pre_tokenizer, or None
    if its steps or its pattern are unknown."""
    *splits, last = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    last = dict(use_regex=True) | last
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    match *splits, last["use_regex"]:
        case [True]:
            return GPT2_PATTERN
        case [{"type": "Digits", "individual_digits": True}, True]:
            return DIGITS_PATTERN
        # every character is in a match, so removing what is in none changes nothing
        case ([{"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, False]
              | [{"pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}, False]):
            return pattern if pattern in PATTERNS else None
    return None


def byte_level_spec(tokens, merges, split):
    """tokenizer.json of a byte-level BPE, as a dict. split: a key of SPLITS."""
    steps = split_steps(SPLITS[one_of("tokenizer.ggml.pre", split, SPLITS)])
    merges = [pair.split(" ") for pair in merges]
    return dict(normalizer=dict(type="NFC") if split in NORMALISED else None,
                pre_tokenizer=dict(type="Sequence", pretokenizers=steps), decoder=BYTE_LEVEL,
                model=bpe(tokens, merges, ignore_merges=split in PIECE_IS_TOKEN))


def sentencepiece_spec(tokens, scores, normal, space_first):
    """tokenizer.json of sentencepiece's BPE, as a dict: spaces are written ▁, characters without a
    token become byte tokens, and the pair whose merged token scores best is merged first. normal:
    ids of the ordinary tokens. space_first: prepend a space to the text."""
    replace = lambda old, new: dict(type="Replace", pattern=dict(String=old), content=new)
    normalizers = [dict(type="Prepend", prepend="▁")] * space_first + [replace(" ", "▁")]
    decoders = [replace("▁", " "), dict(type="ByteFallback"), dict(type="Fuse")]
    decoders += [dict(type="Strip", content=" ", start=1, stop=0)] * space_first
    ids = {tokens[i]: i for i in normal}
    best_first = sorted(ids, key=lambda text: -scores[ids[text]])
    merges = [(left, right) for text in best_first for i in range(len(text) - 1, 0, -1)
              if (right := text[i:]) in ids and (left := text[:i]) in ids]
    return dict(normalizer=dict(type="Sequence", normalizers=normalizers),
                decoder=dict(type="Sequence", decoders=decoders),
                model=bpe(tokens, merges, fuse_unk=True, byte_fallback=True))


def bpe(tokens, merges, **flags):
    return dict(type="BPE", vocab=dict(zip(tokens, range(len(tokens)))), merges=merges, **flags)
