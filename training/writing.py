"""Generates training text for draft heads with the model itself. A chat model answers two kinds of
user messages: those that it writes itself, from the chat template up to the point where a user
message begins (Magpie, arXiv 2406.08464), and those drawn from the templates and word lists of
prompts.json or other files. With prompts it only answers these. A base model continues an empty
prompt."""

import contextlib
import hashlib
import itertools
import json
import random
import re
import sys
from collections import Counter, deque
from functools import cached_property
from pathlib import Path

from common.files import read_json, read_lines, save_lines
from common.values import human
from engine.batching import Engine
from generate import Sampling
from hf.chat import end_of_text
from hf.grammar import GrammarTokenizer
from hf.tokenizer import encode_prompt
from model import InputError, expect
from training.data import ABOUT, format_key
from training.runs import progress

PER_FILE = 32                        # tasks per file
SLOTS = dict(cpu=48, cuda=384)       # sequences decoded together
CAPACITY = 1280                      # most tokens of a chat
LONGEST = dict(user=128, assistant=384)  # tokens of a message
TEMPERATURES = (0.0, 0.8, 0.5, 1.0)  # for answers, cycled through by task
USER_TEMPERATURE = 0.9               # for user messages
MARK = "the user's words"            # placeholder for a user message in a chat template
TEMPLATES = Path(__file__).with_name("prompts.json")
PLACEHOLDER = re.compile(r"\{(?:(\d+)-(\d+)|([a-z]+)\d?)\}")
QUOTED = range(200, 1200)            # lengths of answers to quote as {text}, in characters
CODE = re.compile(r"^```\w*\n[^`]{60,1200}^```$", re.MULTILINE)  # to quote as {block}
SENTENCE = re.compile(r".*(?:[.!?:](?=\s)|\n)", re.DOTALL)  # up to the last sentence's end


class Writer:
    """Writes files of texts to a folder, each with its token ids, since rendering and encoding it
    again may give others. stop: token ids that end a text. prompts: `Prompt`s to answer, once per
    temperature; None: the model's own text. templates: .json files, drawn from equally often.

    A file is the work of PER_FILE tasks, generators that write one or two texts each and yield the
    sequences that they wait for. Task n depends on the seed and n only, and its duplicates are
    dropped when its file is saved, in order: a killed writer continues to the same texts."""

    def __init__(self, folder, model, encoding, stop, seed=0, prompts=None, templates=(TEMPLATES,),
                 log=print):
        self.folder = Path(folder)
        self.model = model
        self.encoding = encoding
        self.template = encoding.template  # None for a base model
        self.format = format_key(encoding)
        self.stop = set(stop)
        self.seed = seed
        self.prompts = prompts
        self.log = log
        self.grammars = list(map(read_templates, templates))
        self.seen = set()         # the first words of all turns in the files so far
        self.dropped = Counter()  # reason -> messages
        self.written = 0          # tokens, those of dropped messages included
        self.running = {}         # Sequence -> its task

    def claim(self):
        """Creates the folder. Raises InputError if it has texts of another model, or answers to
        other prompts or templates."""
        self.folder.mkdir(parents=True, exist_ok=True)
        prompts = hashlib.sha256(repr(self.prompts or self.grammars).encode()).hexdigest()
        about = dict(model=self.model.hash, prompts=prompts, format=self.format)
        file = self.folder / ABOUT
        expect(not file.exists() or read_json(file) == about, f"{self.folder}: another model wrote "
               "these texts, or they have other prompts, --templates or --template-kwargs; use "
               "another --out")
        save_lines(file, [about])

    def write(self, tokens, rank=0, size=1):
        """Writes until all `size` processes together have `tokens` tokens, or have answered all
        prompts; this one writes every size-th file, unless it exists."""
        goal = tokens // size
        tasks = len(self.prompts) * len(TEMPERATURES) if self.prompts else sys.maxsize
        numbers = iter(range(rank, -(-tasks // PER_FILE), size))
        files = deque()  # those in progress, in order: (path, {task number: its texts, or None})
        slots = SLOTS[self.model.device.type]
        done = 0
        show = None
        while done < goal:
            if files and None not in files[0][1].values():
                path, texts = files.popleft()
                done += self.save(path, [*itertools.chain(*texts.values())])
            elif len(self.running) < slots and (number := next(numbers, None)) is not None:
                files.append(self.begin(number))
            elif self.running:
                if not show:
                    before = done  # tokens of an earlier run
                    show = progress(before, goal, 1, self.log, every=60)
                self.step()
                written = before + self.written  # `done` counts only saved files
                show(min(written, goal - 1), self.describe(written, goal))
            else:
                self.log(f"all prompts are answered, at {len(TEMPERATURES)} temperatures, with "
                         f"{human(done * size)} tokens; give more prompts for better heads")
                break
        if show and done >= goal:
            show(done, self.describe(done, goal))

    def describe(self, written, goal):
        dropped = ", ".join(f"{n} {flaw}" for flaw, n in self.dropped.items())
        return f"{human(written)} of {human(goal)} tokens, dropped {dropped or 'none'}"

    def begin(self, number):
        """Reads a file, or else begins its tasks -> (path, {task number: its texts, or None})."""
        path = self.folder / f"{number:05}.jsonl"
        if path.exists():
            return path, {number: [json.loads(line) for line in read_lines(path)]}
        texts = dict.fromkeys(range(number * PER_FILE, (number + 1) * PER_FILE))
        for task in texts:
            self.proceed(self.task(task, texts))
        return path, texts

    def step(self):
        """Runs a step of the engine, and continues the tasks whose sequences it ends."""
        for result in self.engine.step():
            self.written += len(result.tokens)
            if result.sequence.ended:
                self.proceed(self.running.pop(result.sequence))

    def proceed(self, task):
        """Runs a task until it waits for a sequence or ends."""
        if sequence := next(task, None):
            self.running[sequence] = task

    @cached_property
    def engine(self):
        """An Engine with as many slots as fit in memory."""
        slots = SLOTS[self.model.device.type]
        while slots > 1:
            with contextlib.suppress(InputError):
                return Engine(self.model, batch_size=slots, capacity=self.capacity)
            slots //= 2
        return Engine(self.model, batch_size=1, capacity=self.capacity)

    @cached_property
    def capacity(self):
        """Most tokens of a chat; more than CAPACITY if prompts need it."""
        needed = [len(self.prompt("assistant", messages, tools)) + LONGEST["assistant"]
                  for messages, tools, *_ in self.prompts or ()]
        return min(max([CAPACITY, *needed]), self.model.config.block_size)

    @cached_property
    def user_stop(self):
        """What ends a user's message: stop, and the first added token that the template writes
        after one, such as R1's <｜Assistant｜>, or else the text."""
        rest = self.template.render([dict(role="user", content=MARK)]).rpartition(MARK)[2].strip()
        ids = self.encoding.encode(rest, allowed_special="all")
        added = [token for token in ids if token in self.encoding.special_tokens.values()]
        return self.stop.union(added[:1] or filter(None, [rest]))

    def save(self, path, texts):
        """Writes a file, without the turns that repeat earlier ones -> its number of tokens."""
        if self.template and not self.prompts:
            texts = [text for text in map(self.without_repeats, texts) if text["messages"]]
        expect(texts or self.prompts,
               "the model's own texts are all unusable for training; give --data")
        if not path.exists():
            save_lines(path, [text | dict(format=self.format) for text in texts])
        return sum(len(part) for text in texts for part in text["ids"][-2:])

    def without_repeats(self, text):
        """A chat, an object of a line, up to a turn whose message and answer begin like those of an
        earlier turn, with the same twelve words each. Remembers the turns before."""
        messages = text["messages"]
        n = 0
        for turn in zip(messages[::2], messages[1::2]):
            key = tuple(tuple(message["content"].lower().split()[:12]) for message in turn)
            if key in self.seen:
                self.dropped["duplicate"] += 1
                break
            self.seen.add(key)
            n += len(turn)
        return text | dict(messages=messages[:n], ids=text["ids"][:n])

    # ----------------------------------------------------------------------------------------------
    # Tasks: generators that yield the sequences they wait for, and return texts, objects of .jsonl
    # lines

    def task(self, number, texts):
        """Puts the texts of a task into those of its file."""
        write = self.answer if self.prompts else self.pair if self.template else self.text
        texts[number] = yield from write(number)

    def answer(self, number):
        """Answers a prompt: first all at the first temperature, and so on."""
        turn, i = divmod(number, len(self.prompts))
        if turn >= len(TEMPERATURES):  # the last file may have tasks to spare
            return []
        messages, tools, source, *_ = self.prompts[i]
        answer, ids = yield from self.say("assistant", messages, number, TEMPERATURES[turn],
                                          tools=tools, source=source)
        if not answer:
            return []
        if not self.template:
            return [dict(prompt=messages[-1]["content"], completion=answer, ids=ids)]
        messages = [*messages, dict(role="assistant", content=answer)]
        return [dict(messages=messages, ids=ids) | tools]

    def text(self, number):
        """Writes a text of a base model."""
        temperature = TEMPERATURES[number % len(TEMPERATURES)] or 0.8
        text, ids = yield from self.say("assistant", [], number, temperature)
        return [dict(text=text, ids=ids)] if text else []

    def pair(self, number):
        """Writes two chats: one whose first message the model writes, after a system message with
        a topic if there are topics, and one whose first message is drawn, and may quote the other's
        answer or its code. Half have a second turn, of either kind, unless the first answer was
        cut: it may have ended within its reasoning."""
        draw = random.Random(f"{self.seed} {number}")
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        grammar = self.grammars[number // len(TEMPERATURES) % len(self.grammars)]
        topic = [fill(draw, grammar["topics"], grammar["words"], {})] if "topics" in grammar else []
        chats = []
        quotes = {"{text}": "", "{block}": ""}
        for index, drawn in enumerate((False, True)):
            chat, ids = [], []
            for kind in ("templates", "followups")[:draw.choice((1, 2))]:
                if drawn:
                    message = fill(draw, grammar[kind], grammar["words"], quotes)
                else:
                    told = [dict(role="system", content=text) for text in topic] + chat
                    message, _ = yield from self.say("user", told, number, USER_TEMPERATURE, index)
                if not message:
                    break
                asked = [*chat, dict(role="user", content=message.strip())]
                answer, said = yield from self.say("assistant", asked, number, temperature, index)
                if not answer:
                    break
                chat = [*asked, dict(role="assistant", content=answer)]
                ids += said
                if ids[-1][-1] not in self.stop:
                    break
                shown = answer.rpartition("</think>")[2].strip()
                if len(shown) in QUOTED:
                    quotes["{text}"] = shown
                if blocks := CODE.findall(shown):
                    quotes["{block}"] = blocks[-1]
                drawn = draw.random() < 0.5
            chats.append(dict(messages=chat, ids=ids))
        return chats

    @cached_property
    def grammar_tokenizer(self):
        return GrammarTokenizer(self.encoding, self.model.config.vocab_size, self.stop)

    def say(self, role, messages, number, temperature, index=0, tools={}, source=None):
        """Lets the model write a role's next message -> (its text, or None if it is unusable,
        [prompt, token ids with the stop token])."""
        prompt = self.prompt(role, messages, tools)
        longest = min(LONGEST[role], self.model.config.block_size // 4)
        if len(prompt) + longest > self.capacity:
            self.dropped["too long"] += 1
            return None, []
        sampling = Sampling(temperature, seed=self.seed * 1_000_003 + number)
        stop, banned = self.stop, self.encoding.control_ids
        if role == "user":
            stop = self.user_stop
            banned = set(self.encoding.special_tokens.values())  # only answers may reason
        grammar = None
        if source:
            grammar = self.grammar_tokenizer.compile(*source).for_prompt(prompt)
        sequence = self.engine.add(prompt, longest, sampling, stop, encoding=self.encoding,
                                   index=index, grammar=grammar)
        yield sequence
        tokens = [token for token in sequence.tokens if token not in stop]
        stream = self.encoding.stream(stop)
        text = stream.feed(tokens) + stream.finish()
        grams = list(zip(*(tokens[start:] for start in range(4))))
        flaws = {
            "empty": not text.strip(),
            "special tokens": not banned.isdisjoint(tokens),
            "repetitive": len(set(grams)) < len(grams) / 2}
        for flaw, applies in flaws.items():
            if applies:
                self.dropped[flaw] += 1
                return None, []
        if role == "user" and sequence.ended != "stop" and (whole := SENTENCE.match(text)):
            text = whole[0]
        return text, [prompt, sequence.tokens]

    def prompt(self, role, messages, tools={}):
        """The prompt, token ids, for a role's next message."""
        if not self.template:
            text = messages[-1]["content"] if messages else ""
            return encode_prompt(self.encoding, text) or [end_of_text(self.encoding)]
        if role == "assistant":
            return self.encoding.chat(messages, **tools)
        user = dict(role="user", content=MARK)
        text, found, _ = self.template.render([*messages, user]).rpartition(MARK)
        expect(found, f"{self.template.file}: does not render user messages; give --data")
        return self.encoding.encode(text, allowed_special="all")


def read_templates(file):
    """The templates, followups, word lists and, if there are, topics in a .json file. Raises
    InputError if it is malformed."""
    grammar = read_json(file)
    words = grammar.get("words")
    lists = [grammar.get("templates"), grammar.get("followups"), grammar.get("topics", [""])]
    lists += words.values() if isinstance(words, dict) else [None]
    are_texts = (isinstance(entries, list) and entries and all(isinstance(x, str) for x in entries)
                 for entries in lists)
    expect(all(are_texts), f'{file}: expected "templates", "followups" and the lists of "words", '
           "all of strings")
    missing = {kind for entries in lists for entry in entries
               for *_, kind in PLACEHOLDER.findall(entry)} - {"", "text", "block", *words}
    expect(not missing, f"{file}: no words for {{{', '.join(missing)}}}")
    return grammar


def fill(draw, templates, words, quotes):
    """Draws a template and fills in its placeholders. {name}, {name2}: different entries of
    words["name"], each the same in the whole message. {3-9}: a number, drawn each time. quotes:
    what stands for {text} and {block}; templates that need an empty one are not drawn."""
    chosen = dict(quotes)

    def value(match):
        low, high, kind = match.groups()
        if low:
            return str(draw.randint(int(low), int(high)))
        if match[0] not in chosen:
            chosen[match[0]] = draw.choice([x for x in words[kind] if x not in chosen.values()])
            chosen[match[0]] = PLACEHOLDER.sub(value, chosen[match[0]])  # entries have some, too
        return chosen[match[0]]
    possible = [x for x in templates if all(quotes[name] or name not in x for name in quotes)]
    return PLACEHOLDER.sub(value, draw.choice(possible))


def written_by(folder):
    """The hash of the model that wrote a folder's texts; None for other folders and files."""
    file = Path(folder) / ABOUT
    return read_json(file).get("model") if file.exists() else None
