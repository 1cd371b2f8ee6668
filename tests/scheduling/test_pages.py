"""The page pool: who holds what, what is found again, and that a contradiction is named."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peagle.errors import ConfigError
from peagle.scheduling.pages import ROOT_KEY, IntegrityError, OutOfPagesError, PagePool, page_key


def chain(*pages_of_tokens: list[int]) -> list[bytes]:
    keys = [ROOT_KEY]
    for tokens in pages_of_tokens:
        keys.append(page_key(keys[-1], tokens))
    return keys[1:]


def registered(pool: PagePool, keys: list[bytes]) -> list[int]:
    pages = pool.allocate(len(keys))
    for page, key in zip(pages, keys, strict=True):
        pool.register(page, key)
    return pages


def test_all_pages_but_the_waste_page_are_handed_out_once() -> None:
    pool = PagePool(num_pages=6, page_size=4)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used, pool.capacity) == (0, 5, 5)


def test_asking_for_too_much_hands_out_nothing_and_says_how_many_are_free() -> None:
    pool = PagePool(num_pages=6, page_size=4)
    pool.allocate(2)
    with pytest.raises(OutOfPagesError) as caught:
        pool.allocate(4)
    assert caught.value.message == "4 pages requested, 3 of 5 are free"
    assert pool.num_free == 3
    pool.check_integrity()


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(num_pages=4, page_size=2)
    pages = registered(pool, chain([1, 2]))
    pool.share(pages)
    pool.release(pages)
    assert (pool.num_holders(pages[0]), pool.num_used) == (1, 1)
    pool.release(pages)
    assert (pool.num_holders(pages[0]), pool.num_used, pool.num_cached) == (0, 0, 1)
    with pytest.raises(IntegrityError, match=f"page {pages[0]} was released but is not held"):
        pool.release(pages)


def test_a_key_stands_for_the_whole_text_before_it() -> None:
    assert chain([1, 2], [3, 4])[1] != chain([9, 2], [3, 4])[1]
    assert chain([1, 2], [3, 4]) == chain([1, 2], [3, 4])
    assert chain([1, 23])[0] != chain([12, 3])[0]
    keys = chain([1, 2])
    PagePool(num_pages=2, page_size=2).extend_keys(keys, [1, 2, 3, 4, 5, 6, 7])
    assert keys == chain([1, 2], [3, 4], [5, 6])


def test_a_match_ends_at_the_first_page_that_is_not_there() -> None:
    pool = PagePool(num_pages=8, page_size=2)
    keys = chain([1, 2], [3, 4], [5, 6])
    pages = registered(pool, keys)
    other = chain([1, 2], [3, 5], [5, 6])
    assert pool.match(keys) == pages
    assert pool.match(other) == pages[:1]
    assert pool.match(chain([7, 7])) == []


def test_cached_pages_leave_after_the_blank_ones_in_the_order_of_release_and_texts_from_their_end() -> None:
    pool = PagePool(num_pages=6, page_size=2)
    first_keys, second_keys = chain([1, 2], [3, 4]), chain([5, 6], [7, 8])
    first, second = registered(pool, first_keys), registered(pool, second_keys)
    pool.release(second)
    pool.release(first)
    assert pool.num_cached == 4
    (blank,) = pool.allocate(1)
    assert blank not in first + second
    assert pool.allocate(1) == second[1:], "the end of the text released first"
    assert pool.match(second_keys) == second[:1]
    assert pool.allocate(1) == second[:1]
    assert pool.match(first_keys) == first, "what was used later is kept longer"
    pool.check_integrity()


def test_sharing_a_cached_page_saves_it_from_being_handed_out() -> None:
    pool = PagePool(num_pages=4, page_size=2)
    keys = chain([1, 2])
    pages = registered(pool, keys)
    pool.release(pages)
    pool.share(pool.match(keys))
    assert not set(pool.allocate(2)) & set(pages)
    assert pool.num_free == 0
    pool.check_integrity()


def test_the_second_page_with_one_content_stays_private() -> None:
    pool = PagePool(num_pages=4, page_size=2)
    keys = chain([1, 2])
    first, second = registered(pool, keys), registered(pool, keys)
    assert pool.match(keys) == first
    assert pool.has_key(first[0]) and not pool.has_key(second[0])
    pool.release(second)
    assert pool.num_cached == 0
    pool.check_integrity()


def test_a_bare_page_gives_way_to_one_with_drafter_entries() -> None:
    pool, keys = PagePool(num_pages=6, page_size=2), chain([1, 2], [3, 4])
    bare, full, late = (pool.allocate(1)[0] for _ in range(3))
    pool.register(bare, keys[0], is_bare=True)
    assert (pool.match(keys), pool.match(keys, with_bare=False)) == ([bare], [])
    pool.release([bare])
    pool.register(full, keys[0])
    assert pool.match(keys) == pool.match(keys, with_bare=False) == [full]
    assert pool.num_cached == 0 and not pool.has_key(bare)
    pool.register(late, keys[0], is_bare=True)
    assert pool.match(keys) == [full]
    pool.check_integrity([full, late])


def test_without_reuse_nothing_is_found_again() -> None:
    pool = PagePool(num_pages=4, page_size=2, reuse=False)
    keys = chain([1, 2])
    pool.release(registered(pool, keys))
    assert (pool.match(keys), pool.num_cached) == ([], 0)


def test_only_held_pages_are_registered_and_once() -> None:
    pool = PagePool(num_pages=4, page_size=2)
    with pytest.raises(IntegrityError, match="page 1 was registered but is not held"):
        pool.register(1, chain([1, 2])[0])
    (page,) = registered(pool, chain([1, 2]))
    with pytest.raises(IntegrityError, match="or has a key already"):
        pool.register(page, chain([3, 4])[0])


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_a_begun_page_is_a_page(num_tokens: int, num_pages: int) -> None:
    assert PagePool(num_pages=4, page_size=4).pages_for(num_tokens) == num_pages


def test_a_pool_without_a_page_to_hand_out_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        PagePool(num_pages=1, page_size=16)
    assert "a pool of 1 pages of 16 tokens has no room" in str(caught.value)
    assert caught.value.hint is not None and "at least 2 pages" in caught.value.hint


DAMAGE: dict[str, Callable[[PagePool], object]] = {
    "the waste page is held": lambda pool: pool._num_holders.__setitem__(0, 1),
    "the waste page is in circulation": lambda pool: pool._blank.append(0),
    "page 5 is free 2 times": lambda pool: pool._blank.append(5),
    "page 1 is free but has 1 holders": lambda pool: pool._blank.append(1),
    "page 5 is lost": lambda pool: pool._blank.remove(5),
    "page 1 has -1 holders": lambda pool: pool._num_holders.__setitem__(1, -1),
    "page 5 is blank but has a key": lambda pool: pool._key_of_page.__setitem__(5, b"5"),
    "page 5 is bare but has no key": lambda pool: pool._bare.add(5),
    "page 2 is cached but has no key": lambda pool: pool._key_of_page.pop(2),
    "pages with a key and keys with a page differ": lambda pool: pool._page_of_key.clear(),
    "the key of page 2 does not lead back": lambda pool: pool._page_of_key.update({pool._key_of_page[2]: 3}),
    "content is registered though reuse is off": lambda pool: setattr(pool, "reuse", False),
    "page 1 counts 2 holders but 1 hold it": lambda pool: pool._num_holders.__setitem__(1, 2),
}


@pytest.mark.parametrize("complaint", DAMAGE)
def test_a_contradiction_is_named(complaint: str) -> None:
    pool = PagePool(num_pages=6, page_size=2)
    held = pool.allocate(1)
    pool.release(registered(pool, chain([1, 2])))
    assert (held, list(pool._cached)) == ([1], [2])
    pool.check_integrity(held)
    DAMAGE[complaint](pool)
    with pytest.raises(IntegrityError) as caught:
        pool.check_integrity(held)
    assert str(caught.value).startswith(f"page pool: {complaint}")


class AnyUse(RuleBasedStateMachine):
    """Texts over two letters, taken and let go in any order, against a list of what each holder was given."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(num_pages=9, page_size=1)
        self.held: list[list[int]] = []
        self.text_of_page: dict[int, tuple[int, ...]] = {}
        self.bare: set[int] = set()

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=5), is_bare=st.booleans())
    def take(self, text: list[int], is_bare: bool) -> None:
        keys: list[bytes] = []
        self.pool.extend_keys(keys, text)
        shared = self.pool.match(keys, with_bare=is_bare)
        assert is_bare or not self.bare & set(shared), "a page without drafter entries was found"
        for index, page in enumerate(shared):
            assert self.text_of_page[page] == tuple(text[: index + 1]), "a page was found under another text"
        num_held = sum(self.pool.num_holders(page) > 0 for page in shared)
        if len(text) - num_held > self.pool.num_free:
            return
        self.pool.share(shared)
        pages = shared + self.pool.allocate(len(text) - len(shared))
        for index in range(len(shared), len(text)):
            assert all(pages[index] not in others for others in self.held), "a held page was handed out"
            self.text_of_page[pages[index]] = tuple(text[: index + 1])
            self.pool.register(pages[index], keys[index], is_bare)
            (self.bare.add if is_bare else self.bare.discard)(pages[index])
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def the_books_are_right(self) -> None:
        self.pool.check_integrity([page for pages in self.held for page in pages])
        assert self.pool.num_used == len({page for pages in self.held for page in pages})


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
