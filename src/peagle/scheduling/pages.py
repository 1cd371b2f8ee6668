"""The pool of KV cache pages: reference counts, and prefix caching.

A page holds `page_size` positions of the KV cache, of the target and of the drafter under one page id. Page 0 is the
waste page: writes that must not be kept go there, and it is never allocated. Every other page is in one of three
states:

    used     held by one or more requests; read-only if shared
    cached   not held, but its content can still be found by key
    blank    not held, without content

A bare page has no drafter entries, because its request decoded without drafts. Only such requests find it.

The key of a page is a digest of its tokens and of the previous page's key. It identifies the whole prefix up to the end
of the page, and with it the KV cache of target and drafter. Two requests with a common prefix, three tokens per page:

>>> pool = PagePool(num_pages=6, page_size=3)
>>> first = pool.allocate(2)
>>> beginning = page_key(ROOT_KEY, [7, 8, 9])
>>> pool.register(first[0], beginning)          # the first page is full, the second is not
>>> shared = pool.match([beginning, page_key(beginning, [1, 2, 3])])
>>> pool.share(shared)
>>> shared == first[:1], pool.num_used, pool.num_free
(True, 2, 3)

After both requests release it, the first page is cached, and is allocated again only after the blank ones:

>>> pool.release(first); pool.release(shared)
>>> pool.num_used, pool.num_cached, pool.match([beginning]) == shared
(0, 1, True)
>>> pool.allocate(5)[-1:] == shared, pool.match([beginning])
(True, [])
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from peagle.errors import CapacityError, ConfigError

WASTE_PAGE = 0
ROOT_KEY = b""


class OutOfPagesError(CapacityError):
    """An allocation exceeds the free pages; nothing was allocated."""


class IntegrityError(RuntimeError):
    """The engine's state contradicts itself: a bug, never a user's mistake."""


def page_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full page with these tokens, behind the page with key `parent` (`ROOT_KEY` for the first)."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=32).digest()


class PagePool:
    """Owns the page ids 1 .. num_pages - 1. `reuse` enables prefix caching."""

    def __init__(self, num_pages: int, page_size: int, reuse: bool = True) -> None:
        if num_pages < 2 or page_size < 1:
            raise ConfigError(
                f"a pool of {num_pages} pages of {page_size} tokens has no room",
                hint="use at least 2 pages (one is the waste page) of at least 1 token",
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.reuse = reuse
        self._num_holders = [0] * num_pages
        self._blank = list(range(num_pages - 1, WASTE_PAGE, -1))
        """a stack: low ids first"""
        self._cached: dict[int, None] = {}
        """in order of release, least recently used first"""
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}
        self._bare: set[int] = set()
        """pages with a key but without drafter entries"""

    @property
    def capacity(self) -> int:
        """Pages that requests can hold."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now: blank or cached."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Number of pages for `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocate pages: blank ones first, then the least recently used cached ones."""
        if num_pages > self.num_free:
            raise OutOfPagesError(f"{num_pages} pages requested, {self.num_free} of {self.capacity} are free")
        pages = []
        for _ in range(num_pages):
            page = self._blank.pop() if self._blank else self._forget_oldest()
            self._num_holders[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Sequence[int]) -> None:
        """Release the pages of one holder, passed in sequence order.

        The last page is released first, and so evicted first: a page is useful only if all pages before it are cached.
        """
        for page in reversed(pages):
            if self._num_holders[page] < 1:
                raise IntegrityError(f"page {page} was released but is not held")
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                if page in self._key_of_page:
                    self._cached[page] = None
                else:
                    self._blank.append(page)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int]) -> None:
        """Extend `keys`, those of the first pages of a sequence, to all pages that the sequence fills."""
        if self.reuse:
            size = self.page_size
            for start in range(len(keys) * size, len(token_ids) // size * size, size):
                keys.append(page_key(keys[-1] if keys else ROOT_KEY, token_ids[start : start + size]))

    def match(self, keys: Iterable[bytes], with_bare: bool = True) -> list[int]:
        """The cached or used pages for these keys, up to the first miss. Does not hold them."""
        pages = []
        for key in keys:
            page = self._page_of_key.get(key)
            if page is None or (not with_bare and page in self._bare):
                break
            pages.append(page)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that `match` found. It must not write to them."""
        for page in pages:
            if self._num_holders[page] == 0:
                del self._cached[page]
            self._num_holders[page] += 1

    def num_holders(self, page: int) -> int:
        return self._num_holders[page]

    def has_key(self, page: int) -> bool:
        """Whether other requests can find this page; it must not be written again."""
        return page in self._key_of_page

    def register(self, page: int, key: bytes, is_bare: bool = False) -> None:
        """Make a held page available to other requests: all its positions are final, and `key` identifies them.

        If another page has that key already, this one stays private to its holder, or replaces it if that one is bare.
        """
        if self._num_holders[page] < 1 or page in self._key_of_page:
            raise IntegrityError(f"page {page} was registered but is not held, or has a key already")
        other = self._page_of_key.get(key)
        if not self.reuse or (other is not None and (is_bare or other not in self._bare)):
            return
        if other is not None:
            self._forget(other)
        self._page_of_key[key] = page
        self._key_of_page[page] = key
        if is_bare:
            self._bare.add(page)

    def _forget_oldest(self) -> int:
        self._forget(next(iter(self._cached)))
        return self._blank.pop()

    def _forget(self, page: int) -> None:
        """Make a page impossible to find by key; if nobody holds it, it is blank then."""
        del self._page_of_key[self._key_of_page.pop(page)]
        self._bare.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._blank.append(page)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Raise IntegrityError if the pool contradicts itself; `held` lists every page of every holder, if known."""
        for complaint in self._contradictions(held):
            raise IntegrityError(f"page pool: {complaint}")

    def _contradictions(self, held: Iterable[int] | None) -> Iterator[str]:
        counts, free = self._num_holders, Counter([*self._blank, *self._cached])
        if counts[WASTE_PAGE] != 0:
            yield "the waste page is held"
        if WASTE_PAGE in free or WASTE_PAGE in self._key_of_page:
            yield "the waste page is in circulation"
        for page in range(1, self.num_pages):
            count, num_free = counts[page], free.get(page, 0)
            if count < 0:
                yield f"page {page} has {count} holders"
            if num_free > 1:
                yield f"page {page} is free {num_free} times"
            if count and num_free:
                yield f"page {page} is free but has {count} holders"
            if not (count or num_free):
                yield f"page {page} is lost: neither free nor held"
        yield from (f"page {page} is blank but has a key" for page in self._blank if page in self._key_of_page)
        yield from (f"page {page} is cached but has no key" for page in self._cached if page not in self._key_of_page)
        yield from (f"page {page} is bare but has no key" for page in self._bare if page not in self._key_of_page)
        if len(self._key_of_page) != len(self._page_of_key):
            yield "pages with a key and keys with a page differ"
        for page, key in self._key_of_page.items():
            if self._page_of_key.get(key) != page:
                yield f"the key of page {page} does not lead back to it"
        if self._key_of_page and not self.reuse:
            yield "content is registered though reuse is off"
        if held is not None:
            holders = Counter(held)
            for page, count in enumerate(counts):
                if count != holders.get(page, 0):
                    yield f"page {page} counts {count} holders but {holders[page]} hold it"
