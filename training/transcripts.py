"""What an ideal agent says and its tools answer: tasks in, messages out. Knows neither tokens nor edits."""

from training.render import Call, Message
from training.tasks import Task


def transcript(task: Task, disk: dict[str, str]) -> list[Message]:
    """The messages of one task; its files are written to `disk` first, as a driver with a real folder would."""
    disk.update(task.files)
    messages = [Message("user", task.question)]
    failure = task.fail_first
    for paths in task.reads:
        messages.append(Message("assistant", calls=tuple(Call("read_file", {"path": path}) for path in paths)))
        for path in paths:
            messages.append(Message("tool", disk[path] if failure is None else failure))
            failure = None
    return [*messages, Message("assistant", task.answer)]
