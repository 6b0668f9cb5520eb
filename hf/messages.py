"""Messages in the objects of datasets and prompt files, in the one form that chat templates get."""

import json

from model import expect

ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
ROLES |= dict(human="user", prompter="user") | dict.fromkeys(  # names in other datasets
    ("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant")


def messages_of(value):
    """The messages of an object in OpenAI's format ("messages"), TRL's (a "prompt" of messages) or
    ShareGPT's ("conversations"), whose turns may also be OpenAI's. Roles have OpenAI's names."""
    messages = value.get("messages")
    if messages is None and isinstance(value.get("prompt"), list):
        messages = value["prompt"]
    if messages is None and isinstance(value.get("conversations"), list):
        turns = [{"from": "system", "value": value["system"]}] if value.get("system") else []
        messages = [turn if "role" in turn else dict(role=turn.get("from"),
                                                     content=turn.get("value"))
                    for turn in turns + value["conversations"]]
    expect(isinstance(messages, list), 'it has no list of "messages"')
    messages = [message_of(message, f"messages[{i}]") for i, message in enumerate(messages)]
    expect(all("content" in message or message.get("tool_calls") for message in messages),
           "an answer has no content")
    return messages


def tools_of(value):
    """{"tools": [...]}, variables for the chat template, of an object whose tools are a list or a
    string with one; {} without any."""
    tools = value.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    return dict(tools=tools) if tools else {}


def message_of(message, name="message"):
    """A message without nulls, with the parts of its content joined. One of the assistant needs no
    content. name: the message's, in errors."""
    expect(isinstance(message, dict), f"{name} must be an object")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    expect(isinstance(role, str), f"{name}.role must be a string")
    message["role"] = ROLES.get(role.lower(), role)
    if "content" in message or message["role"] != "assistant":
        message["content"] = joined(f"{name}.content", message.get("content"))
    return message


def joined(name, content):
    """The content of a message, a list of parts as one string. name: its name in errors."""
    parts = content if isinstance(content, list) else [dict(type="text", text=content)]
    for part in parts:
        expect(isinstance(part, dict), f"a part of {name} must be an object")
        kind = part.get("type")
        expect(kind == "text", f"{name}: a part of type {kind!r} is not supported; use type text")
        expect(isinstance(part.get("text"), str), f"{name} must be a string")
    return "".join(part["text"] for part in parts)
