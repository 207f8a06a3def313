"""Keys of tokens: apart for each (domain, request, position), equal however the tokens are grouped."""

import numpy as np

from moestro.core.work import domains_of, named_request_key, request_key, request_keys, token_keys


def keys_of(requests, start, num_tokens):
    return token_keys(np.array(requests, np.uint64), np.array(start, np.int32), np.array(num_tokens, np.int32))


def test_a_key_is_that_of_its_request_plus_the_position():
    first, second = request_key(3), request_key(4, domain=2)
    expected = [first + 5, first + 6, first + 7, second + 9]
    assert keys_of([first, second], [5, 9], [3, 1]).tolist() == expected
    alone = [keys_of([first], [at], [1]) for at in (5, 6, 7)]
    assert np.concatenate([*alone, keys_of([second], [9], [1])]).tolist() == expected


def test_tokens_of_domains_requests_and_positions_are_apart():
    rng = np.random.default_rng(0)
    drawn = {tuple(row) for row in rng.integers(0, [200, 2**32, 2**24 - 1], (2000, 3)).tolist()}
    keys = [request_key(number, domain) + position for domain, number, position in drawn]
    assert len(set(keys)) == len(drawn)
    assert domains_of(np.array(keys, np.uint64)).tolist() == [domain for domain, _, _ in drawn]


def test_many_keys_are_those_of_single_numbers():
    numbers = [0, 7, 2**32 - 1, 2**32 + 5]
    assert request_keys(np.array(numbers)).tolist() == [request_key(number) for number in numbers]


def test_names_have_keys_of_their_own_that_do_not_change():
    assert named_request_key("a") == named_request_key("a") != named_request_key("b")
    assert domains_of(np.array([named_request_key("a", 5)], np.uint64)).tolist() == [5]
