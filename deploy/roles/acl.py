"""`rollfab acl`: writes an ACL file for the broker, a user per role with the fewest rights, and a file of passwords."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from ...fabric.contract.errors import ConfigError
from ...fabric.host.directories import write_private
from ...fabric.queue.acl import RIGHTS, acl_file, role_of_user, user_name
from ..cli.options import AsJson
from ..cli.printing import Console, show, show_json
from ..cli.speech import say

PASSWORD_BYTES = 32
NAME_WIDTH = 21


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def acl(
        out: Annotated[Path, typer.Option(help="The ACL file; users in it that are not ours stay.")] = Path(
            "users.acl"
        ),
        passwords: Annotated[Path, typer.Option(help="File of our users' passwords; those that it holds stay.")] = Path(
            "users.passwords"
        ),
        json: AsJson = False,
    ) -> None:
        """Write a broker ACL file: one user per role, with the fewest rights its work needs."""
        made = write_acl(out, passwords)
        if json:
            show_json({"acl": str(out), "passwords": str(passwords), "users": list(made)})
            return
        for role, rights in RIGHTS.items():
            say(Console(), f"{user_name(role):20} {rights.purpose}", indent=NAME_WIDTH)
        show(f"\nGive the broker     aclfile {out.resolve()}      (or, while it runs: ACL LOAD)")
        show(f"Give each role its  ROLLFAB_URL=rediss://USER:PASSWORD@HOST, by the environment\n(see {passwords})")
        say(
            Console(),
            "Add a user of your own to administer the broker: ours may not, and the default user is shut out.",
        )


def write_acl(out: Path, passwords_path: Path) -> dict[str, str]:
    """Write both files, readable by their owner alone; returns user → password.

    Passwords that are in the file already are kept, so that an upgrade changes rights and locks nobody out.

    Raises:
        ConfigError: one of the files cannot be read or written, or holds something else.
    """
    try:
        known = _read_passwords(passwords_path)
        kept = [line for line in _lines(out) if role_of_user(line) is None]
        by_role = {role: known.get(user_name(role)) or secrets.token_urlsafe(PASSWORD_BYTES) for role in RIGHTS}
        made = {user_name(role): password for role, password in by_role.items()}
        write_private(passwords_path, "".join(f"{name} {password}\n" for name, password in made.items()))
        write_private(out, acl_file(by_role, kept))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read or written: {error.strerror}") from error
    return made


def _read_passwords(path: Path) -> dict[str, str]:
    known: dict[str, str] = {}
    for number, line in enumerate(_lines(path), 1):
        name, _, password = line.partition(" ")
        if not name.isascii() or not password or " " in password:
            raise ConfigError(f"{path}, line {number} is not `user password`: is it another file?")
        known[name] = password
    return known


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []
