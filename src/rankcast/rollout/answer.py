"""What one call is going to report, while it is being handled.

This module knows the fields of a report. It must not know what any call does.
"""

from __future__ import annotations

import dataclasses

from rankcast.rollout.connection import Connection
from rankcast.session import Session
from rankcast.topology import Worker
from rankcast.wire.reports import Fault, Report, Touched, Wanted


@dataclasses.dataclass
class Answer:
    """Filled in as a call goes on; ``url`` is where the report goes, empty when nobody listens.

    ``raises`` says that whoever called is not, or may not be, who listens there: it must hear of a fault itself.
    ``stranger`` says that the call was for a connection that this worker does not know.
    """

    call: str
    url: str = ""
    request: str = ""
    session: str = ""
    sequence: int = -1
    faults: list[Fault] = dataclasses.field(default_factory=list)
    repeated: bool = False
    ended: bool = False
    raises: bool = False
    stranger: bool = False
    wrote: bool = False
    tensors: int = 0
    nbytes: int = 0
    opened: bool | None = None
    unreachable: str = ""
    touched: Touched | None = None
    wanted: Wanted | None = None
    digests: str = ""

    def report(
        self,
        worker: Worker,
        session: Session,
        *,
        weight_version: str,
        attested_version: str,
        connection: Connection | None,
        seconds: float,
        unsent: int,
    ) -> Report:
        """The report of this call, with the worker's state as it is now."""
        if self.stranger:
            connection = None
        return Report(
            request=self.request,
            session=self.session,
            call=self.call,
            sequence=self.sequence,
            worker=worker,
            state=str(session.state),
            servable=session.servable,
            generation=session.generation,
            weight_version=weight_version if session.servable else "",
            attested_version=attested_version if session.servable else "",
            connection=connection.name if connection is not None else "",
            nonce=connection.nonce if connection is not None else "",
            plan_hash=connection.plan_hash if connection is not None else "",
            faults=tuple(self.faults),
            repeated=self.repeated,
            ended=self.ended,
            orphaned=session.orphaned,
            unpublished=session.unpublished,
            wrote=self.wrote,
            tensors=self.tensors,
            nbytes=self.nbytes,
            seconds=seconds,
            opened=self.opened,
            unreachable=self.unreachable,
            touched=self.touched,
            wanted=self.wanted,
            unsent=unsent,
            digests=self.digests,
        )
