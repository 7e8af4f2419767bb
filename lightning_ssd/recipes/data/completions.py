"""Conversations and prompts with completions: tokens of which only the answers are predicted."""

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_ssd.recipes.data.documents import documents, json_lines

Sample = tuple[list[int], list[bool]]
"""Token ids, and which of them are predicted."""

_LONGEST_SOURCE = 1200  # characters of a function in the default data


class Templates:
    """Turns a line of a `.jsonl` file into tokens.

    Args:
        tokenizer: Tokenizer of transformers, with an end-of-text token.
        folder: Folder that the tokenizer is in, for messages.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        bos = tokenizer.bos_token_id
        self._begin = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
        self._marks = "{% generation" in (tokenizer.chat_template or "").replace("{%-", "{%")

    def encode(self, record: Any, source: str) -> Sample:
        """Returns the tokens of a record.

        A record with `messages` is rendered by the tokenizer's chat template. The predicted tokens are those that the
        template marks as the assistant's (`{% generation %}`), or, if it marks none, those that each of the assistant's
        messages adds. A record with `prompt` and `completion` is the two texts, one after the other, and an end-of-text
        token; the predicted tokens are those of the completion and the end.

        Args:
            source: File and line, for messages.

        Raises:
            ValueError: If the record has other fields, an empty text or nothing to predict, or if there is no template.
        """
        if isinstance(record, dict) and "messages" in record:
            return self._encode_chat(_checked_messages(record["messages"], source), source)
        if isinstance(record, dict) and {"prompt", "completion"} <= record.keys():
            prompt, completion = (_checked_text(record[name], name, source) for name in ("prompt", "completion"))
            asked, answer = self._tokenize(prompt), self._tokenize(completion)
            ids = [*self._begin, *asked, *answer, self._tokenizer.eos_token_id]
            known = len(self._begin) + len(asked)
            return ids, [False] * known + [True] * (len(ids) - known)
        found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"{source} has neither 'messages' nor 'prompt' and 'completion' (it has {found}): rename its fields, or"
            f" train on plain text by --data=lightning_ssd.recipes.data.TextDataModule"
        )

    def _tokenize(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _encode_chat(self, messages: Sequence[Mapping[str, str]], source: str) -> Sample:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{source} is a chat, and the tokenizer in {self._folder} has no chat template: give it one"
                f" (chat_template.jinja), or write lines with 'prompt' and 'completion'"
            )
        if self._marks:
            chat = self._tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            ids, predicted = list(chat["input_ids"]), [bool(mask) for mask in chat["assistant_masks"]]
        else:
            ids, predicted = self._by_prefixes(messages, source)
        if not any(predicted):
            raise ValueError(f"{source} has no message of the role 'assistant' to learn from: add one, or remove it")
        return ids, predicted

    def _by_prefixes(self, messages: Sequence[Mapping[str, str]], source: str) -> Sample:
        """Returns the tokens of a chat whose template marks none: those that each assistant's message adds."""
        ids = self._render(messages, begun=False)
        predicted = [False] * len(ids)
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:index], begun=True), self._render(messages[: index + 1], begun=False)
            if ids[: len(before)] != before or ids[: len(after)] != after:
                raise ValueError(
                    f"{source}: the chat template in {self._folder} renders a message otherwise when more follow, so"
                    f" that its tokens can't be told: put `{{% generation %}}` around the assistant's part of it"
                )
            predicted[len(before) : len(after)] = [True] * (len(after) - len(before))
        return ids, predicted

    def _render(self, messages: Sequence[Mapping[str, str]], *, begun: bool) -> list[int]:
        chat = self._tokenizer.apply_chat_template(messages, return_dict=True, add_generation_prompt=begun)
        return list(chat["input_ids"])


def read_samples(path: Path, templates: Templates) -> Iterator[tuple[str, Sample]]:
    """Yields file and line, and tokens, of every line of a `.jsonl` file that is not blank.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line is no JSON, or `Templates.encode` refuses it.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"data.path={path} is not a file: set it to a .jsonl file of lines with 'messages', or with 'prompt' and"
            f" 'completion', or leave it out for functions of Python's standard library"
        )
    for source, record in json_lines(path):
        yield source, templates.encode(record, source)


def library_samples(templates: Templates, most: int) -> Iterator[tuple[str, Sample]]:
    """Yields `most` functions of Python's standard library as chats: the prompt is a signature and docstring."""
    for number, (source, messages) in enumerate(islice(_library_functions(), most)):
        yield source, templates.encode({"messages": messages}, f"{source}#{number}")


def _library_functions() -> Iterator[tuple[str, list[dict[str, str]]]]:
    for document in documents(None, "", ""):
        text = b"".join(document.pieces).decode(errors="replace")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # sources of other versions of Python, for tools
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not (docstring := ast.get_docstring(node)):
                continue
            if len(node.body) < 2:
                continue
            body = textwrap.dedent("\n".join(lines[node.body[1].lineno - 1 : node.end_lineno]))
            if not body.strip() or len(body) + len(docstring) > _LONGEST_SOURCE:
                continue
            asked = f"def {node.name}({ast.unparse(node.args)}):\n{docstring.splitlines()[0]}"
            yield document.source, [{"role": "user", "content": asked}, {"role": "assistant", "content": body}]


def _checked_messages(messages: Any, source: str) -> list[Mapping[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{source} has no list of messages under 'messages': correct or remove it")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"{source} has a message without 'role' or 'content': correct or remove it")
        _checked_text(message["content"], "content", source)
    return messages


def _checked_text(text: Any, field: str, source: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{source} has no text under {field!r}: correct or remove it")
    if not text.strip():
        raise ValueError(f"{source} has an empty text under {field!r}: correct or remove it")
    return text
