"""Made-up sessions with the shape of real ones: the same for the same seed and the same Python."""

import json
import pydoc_data.topics
import random
import re
import sysconfig
from pathlib import Path
from typing import Any

import orjson

_PROJECTS = re.findall(
    r"\w+", "atlas borealis cinder drift ember falcon granite harbor indigo juniper kestrel lumen meridian nimbus"
)
_PARTS = re.findall(
    r"\w+", "billing login parser scheduler cache importer exporter search upload webhook invoice session gateway"
)
_ASKS = (
    "Please look into why the {project} {part} fails when {prose}",
    "Add a test for the {part} of {project}. {prose}",
    "The {part} is slow since yesterday; find out what changed in {project} and fix it. {prose}",
    "Rename the {part} module in {project} and keep the old name working for one release.",
    "Write down how the {project} {part} works, for a newcomer. {prose}",
    "{project}/{part}: roll back the last migration and tell me what it touched",
)
_HAN = (
    "请检查登录模块为什么在部署之后失败",
    "数据库连接池的超时设置需要调整",
    "帮我写一个解析日志文件的脚本",
    "搜索功能返回了重复的结果",
    "テストが失敗する理由を調べてください",
)


class Writer:
    """Texts of the kinds that sessions are made of, drawn from Python's own library and documentation."""

    def __init__(self, seed: int = 7) -> None:
        self.random = random.Random(seed)
        prose = "\n\n".join(pydoc_data.topics.topics.values())
        sentences = re.split(r"(?<=[.!?])\s+", prose)
        self._sentences = [" ".join(sentence.split()) for sentence in sentences if 30 < len(sentence) < 300]
        library = Path(sysconfig.get_path("stdlib"))
        self._code: list[str] = []
        for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-l]*/*.py")):
            if "test" not in file.as_posix():
                self._code += file.read_text(encoding="utf-8", errors="replace").splitlines()

    def prose(self, sentences: int) -> str:
        return " ".join(self.random.choices(self._sentences, k=sentences))

    def code(self, lines: int) -> str:
        start = self.random.randrange(len(self._code) - lines - 1)
        return "\n".join(self._code[start : start + lines])

    def output(self, size: int) -> str:
        """What a tool prints: a file, a log, or a listing, about `size` characters long."""
        kind = self.random.random()
        if kind < 0.6:
            return self.code(max(3, size // 34))[: size * 2]
        pieces: list[str] = []
        made = 0
        while made < size:
            number = self.random.getrandbits(48)
            if kind < 0.8:
                moment = f"2026-03-{number % 28 + 1:02d}T{number % 24:02d}:{number % 60:02d}"
                line = f"{moment} INFO req={number:012x} {self._sentence()}"
            else:
                line = f"-rw-r--r-- 1 dev dev {number % 99999:6d} src/{self._name()}/{self._name()}_{number % 977}.py"
            pieces.append(line)
            made += len(line) + 1
        return "\n".join(pieces)

    def _sentence(self) -> str:
        return self.random.choice(self._sentences)[:90]

    def _name(self) -> str:
        return self.random.choice(self.random.choice((_PROJECTS, _PARTS)))

    def session(self, number: int, size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The meta and the messages of one session of about `size` bytes."""
        draw = self.random
        session_id = f"{number:06d}{draw.getrandbits(56):014x}"
        project, part = draw.choice(_PROJECTS), draw.choice(_PARTS)
        messages: list[dict[str, Any]] = []
        made = 0
        while made < size:
            ask = draw.choice(_ASKS).format(project=project, part=part, prose=self.prose(draw.randint(1, 4)))
            if draw.random() < 0.03:
                ask += " " + draw.choice(_HAN)
            messages.append({"role": "user", "content": [{"type": "text", "text": ask}]})
            made += len(ask) + 60
            for _ in range(draw.randint(1, 12)):
                made += self._step(messages, number)
            answer = self.prose(draw.randint(2, 8))
            messages.append(self._assistant([{"type": "text", "text": answer}], number))
            made += len(answer) + 400
        first = messages[0]["content"][0]["text"]
        stamp = f"2026-{number % 12 + 1:02d}-{number % 28 + 1:02d}T10:00:00+00:00"
        meta = {
            "id": session_id,
            "title": first[:48],
            "provider": "anthropic",
            "model": "some-model-1",
            "cwd": f"/home/dev/{project}",
            "api_base": None,
            "message_format_version": 5,
            "created_at": stamp,
            "updated_at": stamp,
            "message_count": len(messages),
        }
        return meta, messages

    def _assistant(self, blocks: list[dict[str, Any]], number: int) -> dict[str, Any]:
        usage = {"input_tokens": 900 + number % 5000, "output_tokens": 120, "cache_read_input_tokens": 800}
        meta = {
            "provider": "anthropic",
            "model": "some-model-1",
            "provider_message_id": f"msg_{self.random.getrandbits(96):024x}",
            "stop_reason": "tool_use",
            "usage": usage,
        }
        return {"role": "assistant", "content": blocks, "meta": meta}

    def _step(self, messages: list[dict[str, Any]], number: int) -> int:
        """One call of a tool and its result."""
        draw = self.random
        call = f"toolu_{draw.getrandbits(96):024x}"
        blocks: list[dict[str, Any]] = []
        if draw.random() < 0.4:
            blocks.append({"type": "thinking", "text": self.prose(draw.randint(1, 6))})
        if draw.random() < 0.5:
            blocks.append({"type": "text", "text": self._sentence()})
        if draw.random() < 0.25:
            tool, arguments = "edit", {"path": f"src/{self._name()}.py", "old": self.code(6), "new": self.code(12)}
        else:
            tool, arguments = "bash", {"command": f"grep -rn {self._name()} src/{self._name()} | head -{number % 90}"}
        blocks.append({"type": "tool_use", "id": call, "name": tool, "input": arguments})
        output = self.output(int(min(40_000, draw.lognormvariate(7.3, 1.2))))
        result = {"type": "tool_result", "tool_use_id": call, "model_text": output, "display_text": output[:200]}
        messages.append(self._assistant(blocks, number))
        messages.append({"role": "user", "content": [{**result, "is_error": False}]})
        return len(output) + 1500


def write_sessions(folder: Path, *, count: int, total_bytes: int, seed: int = 7) -> int:
    """Write `count` sessions of together about `total_bytes` as plain files; returns the bytes of their logs."""
    writer = Writer(seed)
    average = total_bytes / count
    written = 0
    for number in range(count):
        left = (total_bytes - written) / (count - number)
        size = int(min(12 * average, writer.random.lognormvariate(0, 0.8) * left * 0.72))
        meta, messages = writer.session(number, max(2000, size))
        home = folder / meta["id"]
        home.mkdir(parents=True)
        data = b"\n".join(map(orjson.dumps, messages)) + b"\n"
        (home / "messages.jsonl").write_bytes(data)
        (home / "meta.json").write_text(json.dumps(meta))
        written += len(data)
    return written
