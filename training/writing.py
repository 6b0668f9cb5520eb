"""Text that a model writes for its own heads. A chat model also writes the user's messages, given
its template up to where they begin (Magpie, arXiv 2406.08464). That alone gives few kinds of
requests, so half of the messages start with one of openings.jsonl. A base model writes from its
start."""

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
from training.common import progress, save_lines

ABOUT = "written_by.json"            # in the folder of the texts: the model's hash
ROUND = 384                          # conversations per file, before bad ones are dropped
SLOTS = dict(cpu=48, cuda=384)       # sequences decoded together
TEMPERATURES = (0.0, 0.8, 0.5, 1.0)  # of answers, round by round
USER_TEMPERATURE = 0.9               # of the user's words
MARK = "the user's words"            # where they are in a template
OPENINGS = Path(__file__).with_name("openings.jsonl")  # "{text}" stands for an earlier answer
QUOTED = range(200, 1200)            # characters of an answer that is quoted so


class Writer:
    """Writes rounds of texts to a folder. stop: the token ids that end a text."""

    def __init__(self, folder, model, encoding, stop, seed=0, log=print):
        self.folder = Path(folder)
        self.model = model
        self.encoding = encoding
        self.template = encoding.template  # None for a base model
        self.stop = set(stop)
        self.seed = seed
        self.log = log
        self.seen = set()  # how each user message so far begins
        self.openings = [json.loads(line) for line in read_lines(OPENINGS)]
        self.answers = []  # those of the previous round that an opening may quote

    def claim(self):
        """Makes the folder. Raises InputError if another model wrote in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = model_hash(self.model)
        expect(written_by(self.folder) in (None, mine),
               f"{self.folder}: another model wrote these texts; take another --out")
        save_lines(self.folder / ABOUT, [dict(model=mine)])

    def write(self, tokens, rank=0, size=1):
        """Writes until `size` processes together have `tokens` tokens, this one every size-th
        round. A round whose file is there is not written again."""
        goal = tokens // size
        held = 0
        show = None
        for number in itertools.count(rank, size):
            if held >= goal:
                return
            file = self.folder / f"{number:05}.jsonl"
            if file.exists():
                held += self.count(list(map(json.loads, read_lines(file))))
                continue
            show = show or progress(held, goal, 1, self.log)
            texts = self.round(number)
            expect(texts, "none of the texts that the model wrote will do; give --data")
            save_lines(file, texts)
            held += self.count(texts)
            show(held, f"{file.name}: {len(texts)} texts  {human(held)} of {human(goal)} tokens")

    def count(self, texts):
        """Counts the tokens of a round's texts. Notes its user messages, and its answers, which the
        next round may quote."""
        self.answers = []
        for message in itertools.chain(*(text.get("messages", ()) for text in texts)):
            if message["role"] == "user":
                self.is_new(message["content"])
            elif message["role"] == "assistant" and len(message["content"]) in QUOTED:
                self.answers.append(message["content"])
        words = (text.get("text") or "".join(m["content"] for m in text["messages"])
                 for text in texts)
        return sum(len(self.encoding.encode(text)) for text in words)

    def round(self, number):
        """Up to ROUND texts, as lines of .jsonl hold them."""
        seed = self.seed * 1_000_003 + number
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        empty = {i: [] for i in range(ROUND)}
        if not self.template:
            texts = self.extend(empty, "text", seed, temperature or 0.8)
            return [dict(text=message["content"]) for [message] in texts.values()]
        chats = self.extend(empty, "user", seed, USER_TEMPERATURE, self.begin(seed))
        texts = chats = self.extend(chats, "assistant", seed, temperature)
        chats = {i: chat for i, chat in chats.items() if i % 2}  # these have a second turn
        chats = self.extend(chats, "user", seed, USER_TEMPERATURE)
        texts = texts | self.extend(chats, "assistant", seed, temperature)
        return [dict(messages=chat) for chat in texts.values()]

    def begin(self, seed):
        """{number: how this conversation's first message begins} of every second pair."""
        choose = random.Random(seed).choice
        usable = [text for text in self.openings if self.answers or "{text}" not in text]
        return {i: choose(usable).replace("{text}", choose(self.answers or [""]))
                for i in range(ROUND) if i % 4 < 2}

    def extend(self, chats, role, seed, temperature, begun={}):
        """{number: messages}, each with a message that the model wrote in a role, and which starts
        as `begun` says; without those that are no good: empty, near-duplicates of others, runaways,
        with special tokens."""
        context = self.model.config.block_size
        longest = min(128 if role == "user" else 384, context // 4)  # the user's hardly end later
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
            special = not set(tokens).isdisjoint(self.encoding.special_tokens.values())
            grams = list(zip(*(tokens[start:] for start in range(4))))
            repeats = len(set(grams)) < len(grams) / 2
            runaway = repeats or (role == "user" and sequence.ended != "stop")
            if (text.strip() and not special and not runaway
                    and (role == "assistant" or self.is_new(text))):
                extended[i] = [*chats[i], dict(role=role, content=text)]
        return extended

    def engine(self, slots, capacity, sampling):
        """An Engine of as many slots, up to this number, as memory has room for."""
        try:
            return Engine(self.model, batch_size=slots, capacity=capacity, sampling=sampling)
        except InputError:
            if slots == 1:
                raise
        return self.engine(slots // 2, capacity, sampling)

    def prompt(self, chat, role):
        """The token ids after which the model writes a role's next message."""
        if role == "text":
            return encode_prompt(self.encoding, "") or [end_of_text(self.encoding)]
        if role == "assistant":
            return self.encoding.chat(chat)
        user = dict(role="user", content=MARK)
        text, found, _ = self.template.render([*chat, user]).rpartition(MARK)
        expect(found, f"{self.template.file}: does not show what a user says; give --data")
        return self.encoding.encode(text, allowed_special="all")

    def is_new(self, text):
        """Whether no message before began with the same twelve words."""
        before = len(self.seen)
        self.seen.add(tuple(text.lower().split()[:12]))
        return len(self.seen) > before


def written_by(folder):
    """The hash of the model that wrote a folder's texts; None for any other folder or file."""
    file = Path(folder) / ABOUT
    return read_json(file).get("model") if file.exists() else None
