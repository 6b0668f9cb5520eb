"""Log-probabilities in responses of tools/serve.py, in the two forms of OpenAI's API. Both list all
generated tokens, the one that ends the output too. logprobs: as from `LogProbs.of`."""


def spelled(encoding, token):
    """(text, bytes) of a token. The text of bytes that are no whole characters is an escape; the
    bytes are None where the tokenizer has none."""
    data = encoding.token_bytes(token)
    if data is None:
        return encoding.decode([token]), None
    try:
        return data.decode(), [*data]
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), [*data]


def chat_logprobs(encoding, tokens, logprobs):
    """The field logprobs of a chat completion's choice."""
    def entry(token, logprob):
        text, data = spelled(encoding, token)
        return dict(token=text, logprob=logprob, bytes=data)
    content = [entry(token, logprob) | dict(top_logprobs=[entry(*pair) for pair in top.items()])
               for token, (logprob, top) in zip(tokens, logprobs)]
    return dict(content=content, refusal=None)


def completion_logprobs(encoding, tokens, logprobs, offsets):
    """The field logprobs of a completion's choice. offsets: where the tokens begin in the text."""
    text = lambda token: spelled(encoding, token)[0]
    best = [top | {token: logprob} for token, (logprob, top) in zip(tokens, logprobs)]
    return dict(tokens=[*map(text, tokens)], token_logprobs=[logprob for logprob, _ in logprobs],
                top_logprobs=[{text(token): logprob for token, logprob in top.items()}
                              for top in best], text_offset=offsets)
