from array import array

from cluster.scheduling.prefix_cache import BlockKey, PrefixCache

KEY = b"k" * 32


def make_cache(hash_key: bytes = KEY) -> PrefixCache:
    return PrefixCache(hash_key, num_blocks=16, is_enabled=True)


def tokens(*token_ids: int) -> "array[int]":
    return array("I", token_ids)


def test_block_is_found_by_equal_tokens_after_equal_tokens() -> None:
    cache = make_cache()
    first = cache.key_after(cache.root("a"), tokens(1, 2))
    second = cache.key_after(first.digest, tokens(3, 4))
    assert cache.add_block(first, 10)
    assert cache.add_block(second, 11)
    again = cache.key_after(cache.root("a"), tokens(1, 2))
    assert cache.find_block(again) == 10
    assert cache.find_block(cache.key_after(again.digest, tokens(3, 4))) == 11


def test_equal_tokens_after_other_tokens_are_another_block() -> None:
    cache = make_cache()
    parents = [cache.key_after(cache.root("a"), tokens(token, 2)).digest for token in (0, 1)]
    cache.add_block(cache.key_after(parents[0], tokens(3, 4)), 10)
    assert cache.find_block(cache.key_after(parents[1], tokens(3, 4))) is None


def test_tenants_share_nothing() -> None:
    cache = make_cache()
    cache.add_block(cache.key_after(cache.root("a"), tokens(1, 2)), 10)
    assert cache.find_block(cache.key_after(cache.root("b"), tokens(1, 2))) is None


def test_salts_share_nothing() -> None:
    cache = make_cache()
    cache.add_block(cache.key_after(cache.root("a", "one"), tokens(1, 2)), 10)
    assert cache.find_block(cache.key_after(cache.root("a"), tokens(1, 2))) is None
    assert cache.find_block(cache.key_after(cache.root("a", "two"), tokens(1, 2))) is None
    assert cache.find_block(cache.key_after(cache.root("a", "one"), tokens(1, 2))) == 10


def test_salt_that_spells_tokens_is_not_a_block_of_them() -> None:
    cache = make_cache()
    first_tokens = tokens(65, 66)
    salt = first_tokens.tobytes().decode()
    first = cache.key_after(cache.root("a"), first_tokens)
    cache.add_block(cache.key_after(first.digest, tokens(3, 4)), 10)
    assert cache.find_block(cache.key_after(cache.root("a", salt), tokens(3, 4))) is None


def test_digests_depend_on_the_process_key() -> None:
    digests = {
        cache.key_after(cache.root("a"), tokens(1, 2)).digest
        for cache in (make_cache(), make_cache(b"other"))
    }
    assert len(digests) == 2


def test_equal_digest_of_other_tokens_is_no_hit() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    cache.add_block(key, 10)
    assert cache.find_block(BlockKey(key.digest, b"other tokens")) is None


def test_first_of_two_equal_blocks_is_known() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    assert cache.add_block(key, 10)
    assert not cache.add_block(key, 11)
    assert cache.find_block(key) == 10
    assert len(cache) == 1


def test_forgotten_block_is_not_found() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    cache.add_block(key, 10)
    cache.forget_block(10)
    cache.forget_block(10)
    assert cache.find_block(key) is None
    assert len(cache) == 0


def test_tenant_with_a_lone_surrogate_has_a_root() -> None:
    assert len(make_cache().root("\ud800")) == 32


def test_blocks_are_not_proven_after_all_contents_were_lost() -> None:
    cache = make_cache()
    key = cache.key_after(cache.root("a"), tokens(1, 2))
    cache.add_block(key, 10)
    cache.mark_verified([10])
    assert cache.is_verified(10)
    cache.clear()
    assert cache.add_block(key, 10)
    assert not cache.is_verified(10)
