"""The decorator that checks types and shapes of this room's functions under test; an int may stand
for a float."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
