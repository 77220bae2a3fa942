"""Search over all sessions: candidates by words and by meaning, ranked, blended and cut to snippets."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, Field

from carrel.conversation.log_entries import decode, note_kind
from carrel.conversation.search.documents import CONTENT_ID, FIELDS, indexed_texts, is_found_in_parent
from carrel.conversation.search.indexer import SessionIndexer
from carrel.conversation.search.query import Query, Score, parse, rarity, score_document, snippet
from carrel.embedding import Embedder
from carrel.errors import CatalogueBusy, CatalogueLost, ConfigurationError, StorageReadError
from carrel.storage.base import Store
from carrel.storage.text_index import DocumentRef, Phrase, TextIndex

logger = logging.getLogger(__name__)

MIN_COSINE = 0.21
"""Texts with a lower cosine have no more in common than any two texts in the same language."""

_ATTEMPTS = 3

# By words: how many documents are looked at and read for each wanted hit, and how many of one session.
_SCAN_PER_HIT = 400
_READ_PER_HIT = 3
_PER_SESSION = 3

# Only the rarest phrases are looked up in the index; words in more than 20 % of all documents are common.
_RAREST = 5
_COMMON = 0.2
_PREFIX_COUNTED_BELOW = 0.01

# By meaning: how many vectors are considered, and the least cosine as a part of that of the nearest.
_NEAREST = 200
_MIN_OF_NEAREST = 0.65

# Blending by reciprocal rank fusion.
_FUSION = 60
_MEANING_WEIGHT = 0.6


class SearchHit(BaseModel):
    """A message found by a search."""

    session_id: str
    title: str = Field(description="Title of the session")
    seq: int = Field(description="Number of the entry in the log; 0 when the title itself was found")
    role: str = Field(description="user, assistant, compact (a summary), label, title, …")
    snippet: str = Field(description="The part of the text that matches best, in one line")
    marks: list[tuple[int, int]] = Field(description="Positions of the searched words in the snippet, as (start, end)")
    score: float = Field(description="The higher the better; comparable only among the hits of one search")
    updated_at: str = Field(description="Time of the session's last change, UTC, ISO")
    how: Literal["words", "meaning", "both"] = Field(description="What it was found by")
    visible: bool = Field(
        True, description="False: no longer in the conversation as it is loaded (rewound or summarized)"
    )
    archived: bool = Field(False, description="The session is archived")


class _Texts(NamedTuple):
    """The texts of a found document, read from the log."""

    role: str
    text: str
    tools: str


class _Match(NamedTuple):
    """A document found by its words, with its score."""

    ref: DocumentRef
    texts: _Texts
    score: Score


class _Ranked(NamedTuple):
    """A document in the final order."""

    ref: DocumentRef
    score: float
    how: Literal["words", "meaning", "both"]
    match: _Match | None


class SessionSearch:
    """Searches the sessions of a Store.

    The first search indexes everything, each later one first indexes what was added since. The index (in memory
    when it has no path) can be deleted at any time; the next search builds it again."""

    def __init__(self, store: Store, prefix: str, index_path: Path | None, embedder: Embedder | None) -> None:
        self._store = store
        self._embedder = embedder
        self._index = TextIndex(index_path, FIELDS, CONTENT_ID)
        self._indexer = SessionIndexer(store, prefix, self._index, embedder)

    def close(self) -> None:
        """Close the index; the next search opens it again."""
        self._index.close()

    async def search(self, text: str, limit: int = 10) -> list[SearchHit]:
        """Return the best hits for any text: one for each session first, then more from the same sessions."""
        if not isinstance(text, str):
            raise ConfigurationError(f"the query must be a text, not {text!r:.60}")
        if not isinstance(limit, int):
            raise ConfigurationError(f"limit is a whole number, not {limit!r:.60}")
        query = parse(text)
        if limit < 1 or not query.plain:
            return []
        for _ in range(_ATTEMPTS):
            await self._indexer.refresh()
            try:
                matches, near = await asyncio.gather(self._by_words(query, limit), self._by_meaning(query))
            except CatalogueLost:
                continue
            except CatalogueBusy as error:
                await asyncio.to_thread(self._index.file.use_memory, error)
                continue
            return await self._hits(query, _blend(matches, near, 2 * limit, self._newest_first), limit)
        return []

    async def _hits(self, query: Query, ranked: list[_Ranked], limit: int) -> list[SearchHit]:
        """Return the best hits; a message that forks of a deleted session have in common is only in one of them."""
        hits: dict[object, SearchHit] = {}
        for item in ranked:
            hit = await self._hit(query, item)
            if hit is not None:
                session = self._indexer.sessions[hit.session_id]
                is_inherited = any(0 < hit.seq <= at for _, at in session.forks)
                log = session.first_digest if is_inherited else hit.session_id
                hits.setdefault((log, hit.seq, hit.snippet), hit)
            if len(hits) == limit:
                break
        return list(hits.values())

    async def _by_words(self, query: Query, limit: int) -> list[_Match]:
        """Find documents with the words, the best first."""
        if not query.phrases:
            return []
        refs, frequencies = await asyncio.to_thread(self._candidates, query, limit)
        texts = await asyncio.gather(*(self._texts(ref) for ref in refs))
        return await asyncio.to_thread(self._scored, query, frequencies, list(zip(refs, texts, strict=True)))

    def _scored(
        self, query: Query, frequencies: dict[Phrase, float], documents: list[tuple[DocumentRef, _Texts | None]]
    ) -> list[_Match]:
        matches = []
        for ref, texts in documents:
            if texts is None:
                continue
            fields = {"title": texts.text} if texts.role == "title" else {"text": texts.text, "tools": texts.tools}
            result = score_document(query, frequencies, fields)
            # A title that was changed since is still in the index with its old words.
            if result.coverage or texts.role != "title":
                matches.append(_Match(ref, texts, result))
        matches.sort(key=lambda match: (-match.score.value, *self._newest_first(match.ref)))
        return matches

    def _candidates(self, query: Query, limit: int) -> tuple[list[DocumentRef], dict[Phrase, float]]:
        """Return the documents to read and the frequency of each word.

        Documents with all phrases come before those with some, messages before tool output, newer before older."""
        index, wanted = self._index, _READ_PER_HIT * limit
        frequencies = {word: self._frequency(word) for word in query.words}
        found: dict[DocumentRef, None] = {}
        rarest = _rarest_phrases(query, frequencies)
        for phrases in [rarest, query.quoted] if query.quoted and query.quoted != rarest else [rarest]:
            for fields in (("title", "text"), ()):
                scan = _SCAN_PER_HIT * limit
                more = index.find_all(
                    phrases,
                    fields=fields,
                    limit=wanted,
                    per_source=_PER_SESSION,
                    scan=scan,
                    skip=self._is_found_in_parent,
                )
                found |= dict.fromkeys(more)
                if len({ref.source for ref in found}) >= limit:
                    return list(found)[:wanted], frequencies
        if not query.quoted:
            weights = {word: rarity(frequencies[word]) for word in _rarest(query.words, frequencies)}
            some = index.find_any(weights, limit=wanted, per_source=_PER_SESSION, skip=self._is_found_in_parent)
            found |= dict.fromkeys(some)
        return list(found)[:wanted], frequencies

    def _is_found_in_parent(self, ref: DocumentRef) -> bool:
        return is_found_in_parent(self._indexer.sessions, ref.source, ref.number)

    def _frequency(self, word: Phrase) -> float:
        exact = self._index.frequency(word._replace(prefix=False))
        # Counting all words with this beginning takes longer, and for a common word the estimate is good enough.
        return exact if exact > _PREFIX_COUNTED_BELOW or not word.prefix else self._index.frequency(word)

    async def _by_meaning(self, query: Query) -> list[DocumentRef]:
        """Find the document of each session that is nearest in meaning, the best first."""
        vectors = self._indexer.vectors
        if self._embedder is None or vectors is None or query.quoted or not query.phrases:
            return []
        [vector] = await asyncio.to_thread(self._embedder.embed, [query.plain])
        if not any(vector):
            return []
        near = await asyncio.to_thread(vectors.nearest, vector, _NEAREST, MIN_COSINE)
        best: dict[str, DocumentRef] = {}
        for ref, cosine in near:
            if cosine >= near[0][1] * _MIN_OF_NEAREST and not self._is_found_in_parent(ref):
                best.setdefault(ref.source, ref)
        return list(best.values())

    async def _texts(self, ref: DocumentRef) -> _Texts | None:
        """Read a document; None when it was deleted."""
        session = self._indexer.sessions.get(ref.source)
        if session is None or (ref.number == 0 and not session.title_indexed):
            return None
        if ref.number == 0:
            return _Texts("title", session.title, "")
        try:
            async for block in self._store.read(self._indexer.key(ref.source), ref.number):
                entry = await self._indexer.log(ref.source).with_outputs(decode(block.records[0]))
                return _Texts(note_kind(entry) or str(entry.get("role")), *indexed_texts(entry))
        except StorageReadError as error:
            logger.warning("left a message out of the search: %s", error)
        return None

    def _newest_first(self, ref: DocumentRef) -> tuple[float, str, int]:
        """Sort key: the session changed last first, and of each session the latest message."""
        session = self._indexer.sessions.get(ref.source)
        return -_seconds(session.updated_at) if session else 0.0, ref.source, -ref.number

    async def _hit(self, query: Query, ranked: _Ranked) -> SearchHit | None:
        ref = ranked.ref
        texts = ranked.match.texts if ranked.match else await self._texts(ref)
        session = self._indexer.sessions.get(ref.source)
        if texts is None or session is None:
            return None
        piece, marks = snippet(query, texts.text)
        if not marks and texts.tools:
            other = snippet(query, texts.tools)
            piece, marks = other if other[1] or not piece else (piece, marks)
        return SearchHit(
            session_id=ref.source,
            title=session.title,
            seq=ref.number,
            role=texts.role,
            snippet=piece,
            marks=marks,
            score=round(ranked.score, 6),
            updated_at=session.updated_at,
            how=ranked.how,
            visible=session.is_visible(ref.number),
            archived=session.archived,
        )


def _rarest(phrases: list[Phrase], frequencies: dict[Phrase, float]) -> list[Phrase]:
    return sorted(phrases, key=lambda phrase: frequencies.get(phrase, 0.0))[:_RAREST]


def _rarest_phrases(query: Query, frequencies: dict[Phrase, float]) -> list[Phrase]:
    """Return the rarest phrases and all that are quoted.

    Very common words hardly distinguish documents, and finding where many of them meet is slow."""
    common = {word.words[0] for word in query.words if frequencies[word] > _COMMON}
    phrases = [phrase for phrase in query.phrases if not common.issuperset(phrase.words)] or query.phrases
    return list(dict.fromkeys([*_rarest(phrases, frequencies), *query.quoted]))


def _blend(
    matches: list[_Match],
    near: list[DocumentRef],
    limit: int,
    newest_first: Callable[[DocumentRef], tuple[float, str, int]],
) -> list[_Ranked]:
    """Merge the two lists by rank (reciprocal rank fusion), which needs no common scale of their scores."""
    best: dict[str, _Match] = {}
    for match in matches:
        best.setdefault(match.ref.source, match)
    worth: dict[str, float] = {}
    for rank, (session, match) in enumerate(best.items(), 1):
        worth[session] = (0.4 + 0.6 * match.score.coverage) / (_FUSION + rank)
    nearest = {ref.source: ref for ref in near}
    for rank, session in enumerate(nearest, 1):
        worth[session] = worth.get(session, 0.0) + _MEANING_WEIGHT / (_FUSION + rank)
    ranked = []
    for session, value in worth.items():
        top = best.get(session)
        how: Literal["words", "meaning", "both"] = "words" if session not in nearest else "both" if top else "meaning"
        ranked.append(_Ranked(top.ref if top else nearest[session], value, how, top))
    ranked.sort(key=lambda item: (-item.score, *newest_first(item.ref)))
    further = [match for match in matches if best[match.ref.source] is not match]
    for rank, match in enumerate(further[: max(0, limit - len(ranked))], 1):
        ranked.append(_Ranked(match.ref, 0.1 * ranked[-1].score / rank, "words", match))
    return ranked[:limit]


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0
