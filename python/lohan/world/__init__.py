"""The processes that train one model together: who they are, what they tell each other, who died.

_meeting.py lets them meet, _watch.py notices processes that end or fall silent, _world.py exchanges
small messages and raises an error that names the process that a message does not come from, and
_agree.py compares what all processes passed to `lohan.wrap`.
"""
