"""Search over all sessions, by words and by meaning."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, Field

from carrel.conversation.entries import aside_of, decode
from carrel.conversation.indexing import SessionIndex
from carrel.conversation.query import Judgement, Query, judge, parse, rarity, snippet
from carrel.conversation.searchable import FIELDS, OWNER, bounded_texts
from carrel.errors import CatalogueBusy, CatalogueLost, StorageReadError
from carrel.meaning import Embedder, KnowsWords
from carrel.storage.base import Store
from carrel.storage.catalogue import Catalogue, Found, Phrase

logger = logging.getLogger(__name__)

LEAST_NEARNESS = 0.21
"""Texts with a cosine below this have no more in common than any two texts in the same language."""

_FUSION = 60
_MEANING_WEIGHT = 0.6
_READ_PER_HIT = 3
_SCAN_PER_HIT = 400
_PER_SESSION = 3
_RAREST = 5
_COMMON = 0.2
_SELDOM = 0.01
_NEAREST = 200
_NEARLY = 0.65
_TRIES = 3


class SearchHit(BaseModel):
    """A message that answers a search."""

    session_id: str
    title: str = Field(description="The session's title")
    seq: int = Field(description="The entry's sequence number in the log; 0 when it is the title that answers")
    role: str = Field(description="user, assistant, compact (a summary), label, title, …")
    snippet: str = Field(description="The piece of the text that answers best, in one line")
    marks: list[tuple[int, int]] = Field(description="Where in the snippet the words that were asked for stand")
    score: float = Field(description="The higher the better; only good for comparing the hits of one search")
    updated_at: str = Field(description="When the session last changed, UTC, ISO")
    how: Literal["words", "meaning", "both"] = Field(description="What it was found by")
    visible: bool = Field(
        True, description="False: no longer in the conversation as it is loaded (rewound or summed up)"
    )
    archived: bool = Field(False, description="The session is archived")


class _Texts(NamedTuple):
    """A document as the log has it."""

    role: str
    said: str
    did: str


class _Answer(NamedTuple):
    """A document that was read and weighed."""

    found: Found
    texts: _Texts
    judgement: Judgement


class _Ranked(NamedTuple):
    """Where a document comes in the list of hits."""

    found: Found
    score: float
    how: Literal["words", "meaning", "both"]
    answer: _Answer | None


class SessionSearch:
    """Answers searches over the sessions of a Store.

    Nothing is indexed before the first one, and each later one first reads what was added meanwhile. The catalogue
    (in memory when it has no path) can be deleted at any time; the next search makes it again."""

    def __init__(self, store: Store, prefix: str, catalogue_path: Path | None, embedder: Embedder | None) -> None:
        self._store = store
        self._embedder = embedder
        self._catalogue = Catalogue(catalogue_path, FIELDS, OWNER)
        self._index = SessionIndex(store, prefix, self._catalogue, embedder)

    def close(self) -> None:
        """Let go of the catalogue; twice is harmless, and it is usable again."""
        self._catalogue.close()

    async def query(self, text: str, limit: int = 10) -> list[SearchHit]:
        """The best answers to any text at all, one for each session first, then more from the same sessions."""
        query = parse(text)
        if limit < 1 or not query.plain:
            return []
        for _ in range(_TRIES):
            await self._index.refresh()
            try:
                by_words, near = await asyncio.gather(self._by_words(query, limit), self._by_meaning(query))
            except CatalogueLost:
                continue
            except CatalogueBusy as problem:
                await asyncio.to_thread(self._catalogue.file.use_memory, problem)
                continue
            ranked = _blended(by_words, near, limit, self._newness)
            hits = [await self._hit(query, item) for item in ranked]
            return [hit for hit in hits if hit is not None]
        return []

    async def _by_words(self, query: Query, limit: int) -> list[_Answer]:
        """What has the words, the best first."""
        if not query.phrases:
            return []
        found, shares = await asyncio.to_thread(self._candidates, query, limit)
        texts = await asyncio.gather(*(self._texts(place) for place in found))
        return await asyncio.to_thread(self._judged, query, shares, list(zip(found, texts, strict=True)))

    def _judged(
        self, query: Query, shares: dict[Phrase, float], read: list[tuple[Found, _Texts | None]]
    ) -> list[_Answer]:
        answers = []
        for place, texts in read:
            if texts is None:
                continue
            fields = {"title": texts.said} if texts.role == "title" else {"said": texts.said, "did": texts.did}
            judgement = judge(query, shares, fields)
            # A title that was changed since is still found by its old words.
            if judgement.coverage or texts.role != "title":
                answers.append(_Answer(place, texts, judgement))
        answers.sort(key=lambda answer: (-answer.judgement.score, *self._newness(answer.found)))
        return answers

    def _candidates(self, query: Query, limit: int) -> tuple[list[Found], dict[Phrase, float]]:
        """Documents worth reading: those with all that was asked for, then those with most of it.

        What was said goes before what tools printed, and among equals the newest are taken."""
        catalogue, wanted = self._catalogue, _READ_PER_HIT * limit
        shares = {word: self._share(word) for word in query.words}
        found: dict[Found, None] = {}
        telling = _telling(query, shares)
        for phrases in [telling, query.quoted] if query.quoted and query.quoted != telling else [telling]:
            for fields in (("title", "said"), ()):
                scan = _SCAN_PER_HIT * limit
                more = catalogue.find(phrases, fields=fields, limit=wanted, per_source=_PER_SESSION, scan=scan)
                found |= dict.fromkeys(more)
                if len({place.source for place in found}) >= limit:
                    return list(found)[:wanted], shares
        if not query.quoted:
            more = catalogue.weigh(_weights(query, shares), limit=wanted, per_source=_PER_SESSION)
            found |= dict.fromkeys(more)
        return list(found)[:wanted], shares

    def _share(self, word: Phrase) -> float:
        whole = self._catalogue.share(word._replace(prefix=False))
        # Counting all words that begin so takes longer, and of a common one is known enough.
        return whole if whole > _SELDOM or not word.prefix else self._catalogue.share(word)

    async def _by_meaning(self, query: Query) -> list[Found]:
        """What means the same, the nearest of each session, the best first."""
        nearest = self._index.nearest
        if self._embedder is None or nearest is None or query.quoted or not query.phrases:
            return []
        if isinstance(self._embedder, KnowsWords) and not await asyncio.to_thread(self._embedder.knows, query.plain):
            return []
        [vector] = await asyncio.to_thread(self._embedder.embed, [query.plain])
        near = await asyncio.to_thread(nearest.ask, vector, _NEAREST, LEAST_NEARNESS)
        first: dict[str, Found] = {}
        for place, nearness in near:
            if nearness >= near[0][1] * _NEARLY:
                first.setdefault(place.source, place)
        return list(first.values())

    async def _texts(self, place: Found) -> _Texts | None:
        """None when it is gone."""
        known = self._index.known.get(place.source)
        if known is None or (place.number == 0 and not known.titled):
            return None
        if place.number == 0:
            return _Texts("title", known.title, "")
        try:
            async for block in self._store.read(self._index.key(place.source), place.number):
                entry = await self._index.log(place.source).with_outputs(decode(block.records[0]))
                return _Texts(aside_of(entry) or str(entry.get("role")), *bounded_texts(entry))
        except StorageReadError as problem:
            logger.warning("a message that was found is left out: %s", problem)
        return None

    def _newness(self, place: Found) -> tuple[float, str, int]:
        """For sorting: the session that changed last first, the latest message first."""
        known = self._index.known.get(place.source)
        return -_seconds(known.updated_at) if known else 0.0, place.source, -place.number

    async def _hit(self, query: Query, ranked: _Ranked) -> SearchHit | None:
        place, answer = ranked.found, ranked.answer
        texts = await self._texts(place) if answer is None else answer.texts
        known = self._index.known.get(place.source)
        if texts is None or known is None:
            return None
        piece, marks = snippet(query, texts.said)
        if not marks and texts.did:
            other = snippet(query, texts.did)
            piece, marks = other if other[1] or not piece else (piece, marks)
        return SearchHit(
            session_id=place.source,
            title=known.title,
            seq=place.number,
            role=texts.role,
            snippet=piece,
            marks=marks,
            score=round(ranked.score, 6),
            updated_at=known.updated_at,
            how=ranked.how,
            visible=known.shows(place.number),
            archived=known.archived,
        )


def _telling(query: Query, shares: dict[Phrase, float]) -> list[Phrase]:
    """The phrases that tell documents apart, the rarest few and all that are quoted.

    What every other document has tells little, and finding where many such words meet takes long."""
    common = {word.words[0] for word in query.words if shares[word] > _COMMON}
    telling = [phrase for phrase in query.phrases if not common.issuperset(phrase.words)] or query.phrases
    telling = sorted(telling, key=lambda phrase: shares.get(phrase, 0.0))[:_RAREST]
    return list(dict.fromkeys([*telling, *query.quoted]))


def _weights(query: Query, shares: dict[Phrase, float]) -> dict[Phrase, float]:
    """The rarest words, and how much a document that has one of them is worth."""
    rarest = sorted(query.words, key=lambda word: shares[word])[:_RAREST]
    return {word: rarity(shares[word]) for word in rarest}


def _blended(
    answers: list[_Answer], near: list[Found], limit: int, newness: Callable[[Found], tuple[float, str, int]]
) -> list[_Ranked]:
    """One list from two: by the sum of what each place in each list is worth, which needs no common measure."""
    best: dict[str, _Answer] = {}
    for answer in answers:
        best.setdefault(answer.found.source, answer)
    worth: dict[str, float] = {}
    for rank, (session, answer) in enumerate(best.items(), 1):
        worth[session] = (0.4 + 0.6 * answer.judgement.coverage) / (_FUSION + rank)
    nearest = {place.source: place for place in near}
    for rank, session in enumerate(nearest, 1):
        worth[session] = worth.get(session, 0.0) + _MEANING_WEIGHT / (_FUSION + rank)
    ranked = []
    for session, score in worth.items():
        top = best.get(session)
        how: Literal["words", "meaning", "both"] = "words" if session not in nearest else "both" if top else "meaning"
        ranked.append(_Ranked(top.found if top else nearest[session], score, how, top))
    ranked.sort(key=lambda item: (-item.score, *newness(item.found)))
    further = [answer for answer in answers if best[answer.found.source] is not answer]
    for rank, answer in enumerate(further[: max(0, limit - len(ranked))], 1):
        ranked.append(_Ranked(answer.found, 0.1 * ranked[-1].score / rank, "words", answer))
    return ranked[:limit]


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0
