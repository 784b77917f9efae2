"""What can go wrong between us and the database.

    DatabaseError
      DatabaseUnavailable     locked, full, unreachable, read-only: nothing was written, the same call may work later
      DatabaseTooNew          migrated by a later version of this program
      DatabaseInUse           another website runs on it
      NameTaken               a model of that name exists, retired ones included
      NotFound                no such row, or not this visitor's
      VoteRefused
        AlreadyVoted          one vote a battle
        NotVotable            the battle's answers are not all there

Every other exception of SQLAlchemy that leaves `db` is a bug of ours and stays as it is.
"""


class DatabaseError(Exception):
    """Root of what callers of `db` are expected to handle."""


class DatabaseUnavailable(DatabaseError):
    """The transaction was rolled back as a whole; whoever asked may try again."""


class DatabaseTooNew(DatabaseError):
    """The database holds a revision that this version of the program does not know."""


class DatabaseInUse(DatabaseError):
    """One website a database."""


class NameTaken(DatabaseError):
    """A model's name is used once for all time, so that votes of long ago keep their meaning."""


class NotFound(DatabaseError):
    """No such row, or it belongs to another visitor: both look the same from outside."""


class VoteRefused(DatabaseError):
    """The vote was not recorded."""


class AlreadyVoted(VoteRefused):
    """The battle has its one vote."""


class NotVotable(VoteRefused):
    """The battle is in a state without a complete pair of answers."""
