"""Generates training text for draft heads with the model itself. A chat model also generates the
user's messages: its prompt is the chat template up to the point where a user message begins
(Magpie, arXiv 2406.08464). For variety, half of the conversations begin with a line of
openings.jsonl. A base model continues an empty prompt."""

import itertools
import json
import random
from pathlib import Path

from clover import model_hash
from generate import Engine, Sampling
from hf.chat import end_of_text
from hf.text import read_lines
from hf.tokenizer import encode_prompt
from model import InputError, expect, human, read_json
from training.runs import progress, save_lines

ABOUT = "written_by.json"            # records the model's hash beside the texts
ROUND = 16, 384                      # fewest and most chats per file, before bad ones are dropped
CHAT = 256                           # tokens per chat, roughly
SLOTS = dict(cpu=48, cuda=384)       # sequences decoded together
TEMPERATURES = (0.0, 0.8, 0.5, 1.0)  # for answers, cycled through by round
USER_TEMPERATURE = 0.9               # for user messages
MARK = "the user's words"            # placeholder for a user message in a template
OPENINGS = Path(__file__).with_name("openings.jsonl")  # "{text}" stands for an earlier answer
QUOTED = range(200, 1200)            # lengths of answers to quote, in characters


class Writer:
    """Writes rounds of texts to a folder. stop: token ids that end a text."""

    def __init__(self, folder, model, encoding, stop, seed=0, log=print):
        self.folder = Path(folder)
        self.model = model
        self.encoding = encoding
        self.template = encoding.template  # None for a base model
        self.stop = set(stop)
        self.seed = seed
        self.log = log
        self.seen = set()  # the first words of all user messages so far
        self.openings = [json.loads(line) for line in read_lines(OPENINGS)]
        self.answers = []  # answers of the previous round that an opening may quote

    def claim(self):
        """Creates the folder. Raises InputError if another model has written to it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own_hash = model_hash(self.model)
        expect(written_by(self.folder) in (None, own_hash),
               f"{self.folder}: another model wrote these texts; use another --out")
        save_lines(self.folder / ABOUT, [dict(model=own_hash)])

    def write(self, tokens, rank=0, size=1):
        """Writes until all `size` processes together have `tokens` tokens; this one writes every
        size-th round. Rounds that have a file already are not written again."""
        goal = tokens // size
        done = 0
        show = None
        for number in itertools.count(rank, size):
            if done >= goal:
                return
            file = self.folder / f"{number:05}.jsonl"
            if file.exists():
                done += self.count(list(map(json.loads, read_lines(file))))
                continue
            show = show or progress(done, goal, 1, self.log)
            texts = self.round(number, min(max((goal - done) // CHAT, ROUND[0]), ROUND[1]))
            expect(texts, "the model's own texts are all unusable for training; give --data")
            save_lines(file, texts)
            done += self.count(texts)
            show(done, f"{file.name}: {len(texts)} texts  {human(done)} of {human(goal)} tokens")

    def count(self, texts):
        """Counts the tokens of a round's texts. Remembers its user messages, to drop duplicates,
        and its answers, which the next round may quote."""
        self.answers = []
        for message in itertools.chain(*(text.get("messages", ()) for text in texts)):
            if message["role"] == "user":
                self.is_new(message["content"])
            elif message["role"] == "assistant" and len(message["content"]) in QUOTED:
                self.answers.append(message["content"])
        words = (text.get("text") or "".join(m["content"] for m in text["messages"])
                 for text in texts)
        return sum(len(self.encoding.encode(text)) for text in words)

    def round(self, number, count):
        """Generates up to `count` texts, each the object of a .jsonl line."""
        seed = self.seed * 1_000_003 + number
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        empty = {i: [] for i in range(count)}
        if not self.template:
            texts = self.extend(empty, "text", seed, temperature or 0.8)
            return [dict(text=message["content"]) for [message] in texts.values()]
        chats = self.extend(empty, "user", seed, USER_TEMPERATURE, self.begin(seed, count))
        texts = chats = self.extend(chats, "assistant", seed, temperature)
        chats = {i: chat for i, chat in chats.items() if i % 2}  # half get a second turn
        chats = self.extend(chats, "user", seed, USER_TEMPERATURE)
        texts = texts | self.extend(chats, "assistant", seed, temperature)
        return [dict(messages=chat) for chat in texts.values()]

    def begin(self, seed, count):
        """{chat number: opening of its first message}, for half of the chats."""
        choose = random.Random(seed).choice
        usable = [text for text in self.openings if self.answers or "{text}" not in text]
        return {i: choose(usable).replace("{text}", choose(self.answers or [""]))
                for i in range(count) if i % 4 < 2}

    def extend(self, chats, role, seed, temperature, begun={}):
        """Generates a message in a role for each of {number: messages} and appends it. begun:
        {number: its first words}. Drops chats whose new message is empty or repetitive, contains
        special tokens, is unfinished (user only) or a near-duplicate (not for the assistant)."""
        context = self.model.config.block_size
        longest = min(128 if role == "user" else 384, context // 4)  # user messages are short
        prompts = {i: self.prompt(chat, role) + self.encoding.encode(begun.get(i, ""))
                   for i, chat in chats.items()}
        prompts = {i: prompt for i, prompt in prompts.items() if len(prompt) <= context - longest}
        if not prompts:
            return {}
        capacity = max(map(len, prompts.values())) + longest
        slots = min(len(prompts), SLOTS[self.model.device.type])
        engine = self.engine(slots, capacity, Sampling(temperature, seed=seed))
        output = engine.generate(list(prompts.values()), longest, self.stop)
        extended = {}
        for i, sequence in zip(prompts, output.sequences):
            tokens = [token for token in sequence.tokens if token not in self.stop]
            text = begun.get(i, "") + self.encoding.decode(tokens)
            has_special = not set(tokens).isdisjoint(self.encoding.special_tokens.values())
            grams = list(zip(*(tokens[start:] for start in range(4))))
            is_repetitive = len(set(grams)) < len(grams) / 2
            is_unfinished = role == "user" and sequence.ended != "stop"
            if not text.strip() or has_special or is_repetitive or is_unfinished:
                continue
            if role == "assistant" or self.is_new(text):
                extended[i] = [*chats[i], dict(role=role, content=text)]
        return extended

    def engine(self, slots, capacity, sampling):
        """An Engine with `slots` slots, halved until it fits in memory."""
        try:
            return Engine(self.model, batch_size=slots, capacity=capacity, sampling=sampling)
        except InputError:
            if slots == 1:
                raise
        return self.engine(slots // 2, capacity, sampling)

    def prompt(self, chat, role):
        """The prompt, token ids, for a role's next message."""
        if role == "text":
            return encode_prompt(self.encoding, "") or [end_of_text(self.encoding)]
        if role == "assistant":
            return self.encoding.chat(chat)
        user = dict(role="user", content=MARK)
        text, found, _ = self.template.render([*chat, user]).rpartition(MARK)
        expect(found, f"{self.template.file}: does not render user messages; give --data")
        return self.encoding.encode(text, allowed_special="all")

    def is_new(self, text):
        """Whether no earlier user message has the same first twelve words. Remembers these."""
        before = len(self.seen)
        self.seen.add(tuple(text.lower().split()[:12]))
        return len(self.seen) > before


def written_by(folder):
    """The hash of the model that wrote a folder's texts; None for other folders and files."""
    file = Path(folder) / ABOUT
    return read_json(file).get("model") if file.exists() else None
