"""Generates training text for draft heads with the model itself. A chat model answers two kinds of
user messages: those that it writes itself, from the chat template up to the point where a user
message begins (Magpie, arXiv 2406.08464), and those drawn from the templates and word lists of
prompts.json. With prompts it only answers these. A base model continues an empty prompt."""

import hashlib
import itertools
import json
import random
import re
from collections import Counter, deque
from functools import cached_property
from pathlib import Path

from clover import model_hash
from generate import Engine, Sampling
from hf.chat import end_of_text
from hf.text import read_lines
from hf.tokenizer import encode_prompt
from model import InputError, expect, human, read_json
from training.runs import progress, save_lines

ABOUT = "written_by.json"            # records beside the texts who wrote them
PER_FILE = 32                        # tasks per file
PER_TASK = 512                       # tokens, roughly
SLOTS = dict(cpu=48, cuda=384)       # sequences decoded together
CAPACITY = 1280                      # most tokens of a chat
TEMPERATURES = (0.0, 0.8, 0.5, 1.0)  # for answers, cycled through
USER_TEMPERATURE = 0.9               # for user messages
MARK = "the user's words"            # placeholder for a user message in a template
GRAMMAR = Path(__file__).with_name("prompts.json")
PLACEHOLDER = re.compile(r"\{(?:(\d+)-(\d+)|([a-z]+)\d?)\}")
QUOTED = range(200, 1200)            # lengths of answers that {text} may stand for, in characters


class File:
    """A file of texts that is being written. tasks: the numbers of its tasks. texts: the texts of
    each finished task, objects of .jsonl lines."""

    def __init__(self, path, tasks):
        self.path = path
        self.exists = path.exists()
        self.tasks = () if self.exists else tasks
        self.texts = {}


class Writer:
    """Writes files of texts to a folder. stop: token ids that end a text. prompts: conversations
    (lists of messages) to answer, each once per temperature; default: own text.

    A file is the work of PER_FILE tasks, generators that write one or two texts each and yield the
    sequences they need. Task n depends on the seed and n only, and what is dropped as a duplicate
    on the files before: a killed writer continues to the same texts."""

    def __init__(self, folder, model, encoding, stop, seed=0, prompts=None, log=print):
        self.folder = Path(folder)
        self.model = model
        self.encoding = encoding
        self.template = encoding.template  # None for a base model
        self.stop = set(stop)
        self.seed = seed
        self.prompts = prompts
        self.log = log
        self.grammar = read_json(GRAMMAR)
        self.seen = set()         # the first words of all turns saved so far
        self.dropped = Counter()  # reason -> messages
        self.running = {}         # Sequence -> (task, its number, its File)

    def claim(self):
        """Creates the folder. Raises InputError if it has texts of another model, or of answers to
        other prompts."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = dict(model=model_hash(self.model))
        if self.prompts:
            about["prompts"] = hashlib.sha256(repr(self.prompts).encode()).hexdigest()[:16]
        file = self.folder / ABOUT
        expect(not file.exists() or read_json(file) == about, f"{self.folder}: another model wrote "
               "these texts, or they answer other prompts; use another --out")
        save_lines(file, [about])

    def write(self, tokens, rank=0, size=1):
        """Writes until all `size` processes together have `tokens` tokens, or all prompts are
        answered; this process writes every size-th file -> its number of tokens. Files that exist
        are not written again."""
        goal = tokens // size
        files = deque()  # begun and not saved yet, in order
        queue = deque()  # (number, File) of tasks to begin
        paths = self.files(rank, size)
        done = saved = 0
        show = None
        while done < goal:
            average = done / saved if saved else PER_FILE * PER_TASK
            if files and len(files[0].texts) == len(files[0].tasks):
                file = files.popleft()
                before = done
                done += self.save(file)
                saved += 1
                if show and (done >= goal or 50 * done // goal > 50 * before // goal):
                    dropped = ", ".join(f"{n} {why}" for why, n in self.dropped.most_common())
                    show(done, f"{file.path.name}  {human(done)} of {human(goal)} tokens  "
                               f"dropped: {dropped or 'none'}")
            elif not queue and done + average * len(files) < goal and (file := next(paths, None)):
                files.append(file)
                queue.extend((number, file) for number in file.tasks)
            elif queue or self.running:
                show = show or progress(done, goal, 1, self.log)
                self.step(queue)
            else:
                break  # all prompts are answered
        return done

    def files(self, rank, size):
        """Yields the files of a process."""
        tasks = len(self.prompts) * len(TEMPERATURES) if self.prompts else None
        for number in itertools.count(rank, size):
            first = number * PER_FILE
            last = first + PER_FILE if tasks is None else min(first + PER_FILE, tasks)
            if first >= last:
                return
            yield File(self.folder / f"{number:05}.jsonl", range(first, last))

    def step(self, queue):
        """Begins tasks while slots are free, runs a step of the engine, and continues the tasks
        whose sequences it ends."""
        while queue and len(self.running) < self.engine.decoder.batch_size:
            number, file = queue.popleft()
            self.proceed(self.task(number), number, file)
        for result in self.engine.step():
            if result.sequence.ended:
                self.proceed(*self.running.pop(result.sequence), result.sequence)

    def proceed(self, task, number, file, sequence=None):
        """Continues a task with the sequence it waited for, to its next one or to its end."""
        try:
            prompt, longest, sampling, index = task.send(sequence)
        except StopIteration as end:
            file.texts[number] = end.value
            return
        sequence = self.engine.add(prompt, longest, sampling, self.stop, index=index)
        self.running[sequence] = task, number, file

    @cached_property
    def engine(self):
        """An Engine with as many slots as fit in memory."""
        slots = SLOTS[self.model.device.type]
        while True:
            try:
                return Engine(self.model, batch_size=slots, capacity=self.capacity)
            except InputError:
                if slots == 1:
                    raise
            slots //= 2

    @cached_property
    def capacity(self):
        """Most tokens of a chat: more than CAPACITY only for prompts that need it."""
        needed = [len(self.prompt(prompt)) + self.longest() for prompt in self.prompts or ()]
        return min(max([CAPACITY, *needed]), self.model.config.block_size)

    def longest(self, role="assistant"):
        """Most tokens of a message."""
        return min(128 if role == "user" else 384, self.model.config.block_size // 4)

    def save(self, file):
        """Saves a file without the turns that repeat earlier ones -> its number of tokens."""
        if file.exists:
            texts = list(map(json.loads, read_lines(file.path)))
            self.without_repeats(texts)
        else:
            texts = [text for number in file.tasks for text in file.texts[number]]
            texts = self.without_repeats(texts)
            expect(texts or self.prompts,
                   "the model's own texts are all unusable for training; give --data")
            save_lines(file.path, texts)
        words = itertools.chain(*map(words_of, texts))
        return sum(len(self.encoding.encode(text)) for text in words)

    def without_repeats(self, texts):
        """Cuts each chat before a turn whose message and answer begin like those of an earlier turn
        (twelve words each). Remembers the others."""
        kept = []
        for text in texts:
            messages = text.get("messages", ())
            if self.prompts or not messages:
                kept.append(text)
                continue
            turns = 0
            for question, answer in zip(messages[::2], messages[1::2]):
                key = tuple(tuple(message["content"].lower().split()[:12])
                            for message in (question, answer))
                if key in self.seen:
                    self.dropped["duplicate"] += 1
                    break
                self.seen.add(key)
                turns += 1
            if turns:
                kept.append(dict(messages=messages[:2 * turns]))
        return kept

    # ----------------------------------------------------------------------------------------------
    # Tasks: generators that yield arguments of `Engine.add`, get the `Sequence`, and return texts

    def task(self, number):
        if self.prompts:
            return self.answer(number)
        return self.pair(number) if self.template else self.text(number)

    def answer(self, number):
        """Answers a prompt."""
        turn, i = divmod(number, len(self.prompts))
        messages = self.prompts[i]
        answer = yield from self.say(messages, number, TEMPERATURES[turn])
        if not answer:
            return []
        if not self.template:
            return [dict(prompt=messages[-1]["content"], completion=answer)]
        return [dict(messages=[*messages, dict(role="assistant", content=answer)])]

    def text(self, number):
        """Writes a text of a base model."""
        temperature = TEMPERATURES[number % len(TEMPERATURES)] or 0.8
        text = yield from self.say(None, number, temperature)
        return [dict(text=text)] if text else []

    def pair(self, number):
        """Writes two chats: one that the model begins itself, and one that begins with a template,
        which may quote the first one's answer. Half have a second turn of either kind."""
        rng = random.Random(f"{self.seed} {number}")
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        chats = []
        quote = ""
        for index, by_model in enumerate((True, False)):
            chat = []
            for turn in range(rng.choice((1, 2))):
                if by_model if turn == 0 else rng.random() < 0.5:
                    message = yield from self.say(chat, number, USER_TEMPERATURE, index, "user")
                else:
                    kind = "followups" if turn else "templates"
                    message = draw(self.grammar[kind], self.grammar["words"], rng, quote)
                if not message:
                    break
                asked = [*chat, dict(role="user", content=message)]
                answer = yield from self.say(asked, number, temperature, index)
                if not answer:
                    break
                chat = [*asked, dict(role="assistant", content=answer)]
                quote = answer if len(answer) in QUOTED else quote
            if chat:
                chats.append(dict(messages=chat))
        return chats

    def say(self, messages, number, temperature, index=0, role="assistant"):
        """Lets the model write a message -> its text, or None if it is unusable."""
        prompt = self.prompt(messages, role)
        longest = self.longest(role)
        if len(prompt) + longest > self.capacity:
            self.dropped["too long"] += 1
            return None
        sampling = Sampling(temperature, seed=self.seed * 1_000_003 + number)
        sequence = yield prompt, longest, sampling, index
        tokens = [token for token in sequence.tokens if token not in self.stop]
        text = self.encoding.decode(tokens)
        grams = list(zip(*(tokens[start:] for start in range(4))))
        reasons = {
            "empty": not text.strip(),
            "special": not set(tokens).isdisjoint(self.encoding.special_tokens.values()),
            "repetitive": len(set(grams)) < len(grams) / 2,
            "unfinished": role == "user" and sequence.ended != "stop"}
        self.dropped.update([reason for reason, applies in reasons.items() if applies][:1])
        return None if any(reasons.values()) else text

    def prompt(self, messages, role="assistant"):
        """The prompt, token ids, for a role's next message. messages None: for a text."""
        if messages is None:
            return encode_prompt(self.encoding, "") or [end_of_text(self.encoding)]
        if not self.template:
            return encode_prompt(self.encoding, messages[-1]["content"])
        if role == "assistant":
            return self.encoding.chat(messages)
        user = dict(role="user", content=MARK)
        text, found, _ = self.template.render([*messages, user]).rpartition(MARK)
        expect(found, f"{self.template.file}: does not render user messages; give --data")
        return self.encoding.encode(text, allowed_special="all")


def draw(templates, words, rng, quote=""):
    """Draws a template and fills it. {name}, {name2}: different entries of words["name"], the same
    in the whole message. {3-9}: a number, drawn each time. {text}: the quote; if that is empty,
    no template with it is drawn."""
    chosen = {"{text}": quote}

    def fill(match):
        low, high, kind = match.groups()
        if low:
            return str(rng.randint(int(low), int(high)))
        if match[0] not in chosen:
            entry = rng.choice([entry for entry in words[kind] if entry not in chosen.values()])
            chosen[match[0]] = entry
            chosen[match[0]] = PLACEHOLDER.sub(fill, entry)
        return chosen[match[0]]
    return PLACEHOLDER.sub(fill, rng.choice([t for t in templates if quote or "{text}" not in t]))


def words_of(text):
    """The strings of a .jsonl line's object."""
    if "messages" in text:
        return [message["content"] for message in text["messages"]]
    return text.values()


def written_by(folder):
    """The hash of the model that wrote a folder's texts; None for other folders and files."""
    file = Path(folder) / ABOUT
    return read_json(file).get("model") if file.exists() else None
