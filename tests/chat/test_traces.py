import json

from leyline_server.model.chat.arguments import compact


def test_every_recorded_call_comes_back(fmt, say, body, traces):
    conversations = json.loads((traces / "tau-bench" / "gpt-4o-airline.json").read_text(encoding="utf-8"))
    count = 0
    for conversation in conversations:
        for message in conversation["traj"]:
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
            if not calls:
                continue
            ids = body(fmt, say("assistant", message.get("content") or "", calls))
            parsed = fmt.parse(ids)
            expected = [(name, compact(arguments), "") for name, arguments in calls]
            assert [(c.name, c.arguments_json, c.error) for c in parsed.calls] == expected
            assert [json.loads(c.arguments_json) for c in parsed.calls] == [json.loads(a) for _, a in calls]
            assert parsed.text == (message.get("content") or "")
            assert parsed.closed
            count += len(calls)
    assert count == 1164
