"""The tokenizer of a Hugging Face folder, and the chat template that goes with it."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxforge.config.errors import ConfigError
from jaxforge.data.jinja_template import JinjaTemplate
from jaxforge.data.templates import ChatML, ChatTemplate, Llama3, NoTemplate

# The named special tokens that tokenizer_config.json and special_tokens_map.json may hold.
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class HFTokenizer:
    """Reads `tokenizer.json` by the `tokenizers` library; no code of the folder runs, and no pickle is opened.

    Attributes:
      folder: where it was read from.
      special_tokens: the texts of all special tokens.
      named_tokens: special tokens by the name that chat templates know them by, such as `eos_token`.
      bos: the id of the token that begins a text; None if there is none.
      eos: the id of the token that ends a text; None if there is none.
      adds_bos: whether a text begins with `bos` without anybody writing it.
      adds_space: whether the tokenizer puts a space before every text, as those of Llama 2 do.
      vocab_size: the rows that an embedding needs at least: the largest id plus 1.
      chat_template: the folder's jinja template; None if it has none.
      fingerprint: changes with everything that token ids depend on, and with the template.
    """

    def __init__(self, folder: str | Path):
        """Raises ConfigError, naming data.tokenizer, where the folder holds no fast tokenizer or a broken one."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(
                f"data.tokenizer={folder} is no folder of this machine; download the checkpoint first, and give the"
                " folder that has tokenizer.json"
            )
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"data.tokenizer={folder} has no tokenizer.json; a folder with a slow tokenizer alone gets one by"
                f" transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error
        self._tokenizer, self._literal = _load(text, path), _load(text, path)
        self._literal.encode_special_tokens = True
        config = _read_json(self.folder / "tokenizer_config.json")
        self._check_added_tokens(config)
        named = _read_json(self.folder / "special_tokens_map.json") | config
        self.named_tokens = {name: token for name in _NAMES if (token := _token_text(named.get(name)))}
        self.bos = self._named_id("bos_token")
        self.eos = self._named_id("eos_token")
        if self.eos is None:
            self.eos = self._model_eos()
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special} | set(self.named_tokens.values())
        self.special_tokens = tuple(sorted(special))
        self.adds_bos = self._find_adds_bos(config)
        self.adds_space = _adds_space(json.loads(text))
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.chat_template = self._find_template(config)
        parts = [text, self.chat_template, self.named_tokens, self.bos, self.eos, self.adds_bos]
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens written in it become their ids, and none is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_literally(self, text: str) -> list[int]:
        """The ids of a text in which special tokens are text like any other."""
        return self._literal.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens written out."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of the token that has exactly this text; None if there is none."""
        return self._tokenizer.token_to_id(text)

    def _named_id(self, name: str) -> int | None:
        if name not in self.named_tokens:
            return None
        token = self.token_id(self.named_tokens[name])
        if token is None:
            raise ConfigError(
                f"data.tokenizer={self.folder}: {name} is {self.named_tokens[name]!r}, which tokenizer.json does not"
                " know; save the tokenizer again with transformers"
            )
        return token

    def _model_eos(self) -> int | None:
        """The end token of the model's own files, where the tokenizer's name none."""
        for name in ("generation_config.json", "config.json"):
            eos = _read_json(self.folder / name).get("eos_token_id")
            eos = eos[0] if isinstance(eos, list) and eos else eos
            if eos is None:
                continue
            if not isinstance(eos, int) or eos < 0 or self._tokenizer.id_to_token(eos) is None:
                raise ConfigError(
                    f"data.tokenizer={self.folder}: {name} has eos_token_id={eos}, which tokenizer.json does not know;"
                    " name the token as eos_token in tokenizer_config.json"
                )
            return eos
        return None

    def _find_adds_bos(self, config: Mapping[str, Any]) -> bool:
        """By the config's flag, else by what the tokenizer does to an empty text."""
        if self.bos is None:
            return False
        if isinstance(config.get("add_bos_token"), bool):
            return config["add_bos_token"]
        return self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [self.bos]

    def _check_added_tokens(self, config: Mapping[str, Any]) -> None:
        """The config lists added tokens a second time; where it knows others, ids would differ from transformers'."""
        for number, token in config.get("added_tokens_decoder", {}).items():
            text = _token_text(token)
            if text and self.token_id(text) != int(number):
                raise ConfigError(
                    f"data.tokenizer={self.folder}: tokenizer_config.json gives {text!r} the id {number},"
                    f" tokenizer.json {self.token_id(text)}; save the tokenizer again with transformers"
                )

    def _find_template(self, config: Mapping[str, Any]) -> str | None:
        """From a jinja file, a JSON file or the tokenizer's config, in this order; of several the one named default."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = _read_json(self.folder / "chat_template.json").get("chat_template") or config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        if isinstance(template, Mapping):
            if "default" not in template:
                raise ConfigError(
                    f"data.tokenizer={self.folder} has the chat templates {', '.join(template)} and none named"
                    " default; write the one you want to chat_template.jinja in that folder"
                )
            template = template["default"]
        return template


def choose_template(name: str, tokenizer: HFTokenizer, system: str | None = None) -> ChatTemplate:
    """The chat template that data.chat_template names, for a tokenizer.

    Args:
      name: "chatml", "llama3", "checkpoint", or "auto", which goes by the special tokens and then by the folder.
      tokenizer: the tokenizer that the template's special tokens must belong to.
      system: the system message of conversations without one; None leaves it to the template.  ChatML then writes
        the one that the folder's own template writes, if that is ChatML too.

    Raises ConfigError where the tokenizer lacks the template's special tokens, or the template.  Where "auto" finds
    nothing, and where the tokenizer puts spaces before texts, the first conversation raises it: plain texts need no
    template.
    """
    found = f"data.chat_template={name} with data.tokenizer={tokenizer.folder}"
    if tokenizer.adds_space:
        return NoTemplate(
            f"{found}: the tokenizer puts a space before every text, so the parts of a conversation can't be encoded"
            " one by one; use plain texts, or a tokenizer without it, such as those of Llama 3 and Qwen"
        )
    own = tokenizer.chat_template
    if name == "auto":
        known = {"chatml": ChatML.control_tokens, "llama3": Llama3.control_tokens}
        fits = (form for form, tokens in known.items() if not _lacking(tokenizer, tokens))
        name = next(fits, "checkpoint")
        if name == "checkpoint" and own is None:
            return NoTemplate(
                f"{found}: the tokenizer has the special tokens of neither ChatML nor Llama 3, and the folder no chat"
                " template; put one into the folder as chat_template.jinja, or use plain texts"
            )
    if name == "checkpoint":
        if own is None:
            raise ConfigError(f"{found}: the folder has no chat template; put one there as chat_template.jinja")
        return JinjaTemplate(own, tokenizer.named_tokens, tokenizer.special_tokens, system)
    template = Llama3(system) if name == "llama3" else ChatML(system)
    lacking = _lacking(tokenizer, template.control_tokens)
    if lacking:
        raise ConfigError(f"{found}: the tokenizer has no {lacking[0]}; use data.chat_template=auto")
    if name == "chatml" and system is None and own is not None:
        return ChatML(JinjaTemplate(own, tokenizer.named_tokens, tokenizer.special_tokens).chatml_system())
    return template


def _lacking(tokenizer: HFTokenizer, tokens: Iterable[str]) -> list[str]:
    return [token for token in tokens if tokenizer.token_id(token) is None]


def _load(text: str, path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise _unreadable(path, error) from None
    # a saved tokenizer may remember how its last user cut and padded texts
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.tokenizer={path.parent}: tokenizer.json can't be read: {error}; copy it again from the checkpoint"
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.tokenizer: {path} can't be read as JSON: {error}; copy it again from the checkpoint"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"data.tokenizer: {path} holds no JSON object; copy it again from the checkpoint")
    return content


def _token_text(token: Any) -> str | None:
    """A token is given as its text, or as an object that holds it."""
    return token.get("content") if isinstance(token, Mapping) else token


def _adds_space(description: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json has a step that puts a space, or a sign for it, before every text."""
    for step in _steps(description.get("normalizer")):
        if step.get("type") == "Prepend":
            return True
    for step in _steps(description.get("pre_tokenizer")):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            return True
    return False


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A step of tokenizer.json, or all those of a sequence."""
    if step is None:
        return
    yield step
    for inner in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _steps(inner)
