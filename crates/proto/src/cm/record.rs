//! Records: all that a DREQ of a connection needs. Another process can send it if this one is killed.
//!
//! If [`CmConfig::records`](super::CmConfig) asks for it, the machine keeps a record of each connection that the peer
//! may take for established, from its REP on. [`Cm::poll_record`] tells when a record is new and when there is none any
//! more. The machine of another process takes over such a connection only to end it ([`Cm::disconnect_for`]).
//!
//! The target of an XRC connection has none: it outlives its process where others have opened it.

use std::time::Duration;

use super::connection::{Connection, ConnectionState as S};
use super::error::CmError;
use super::id::CommId;
use super::machine::Cm;
use super::message::private_data::PrivateData;
use super::outbox::Destination;
use super::params::Transport;
use super::qp_attr::{QpParams, Side};
use super::repeats::Attempt;
use super::timeout;
use crate::time::Time;
use crate::types::{Gid, Mtu, Qpn};

/// A connection, for the process that has to end it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// Our name of it.
    pub id: CommId,
    /// The peer's.
    pub remote_id: CommId,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// Our address.
    pub sgid: Gid,
    /// The peer's.
    pub dgid: Gid,
    /// The interface of its link, as in [`Transmit`](super::Transmit).
    pub interface: u32,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Time to wait for an answer, in whole microseconds.
    pub timeout: Duration,
    /// Times to ask again.
    pub max_retries: u8,
}

/// Most retries that a REQ can ask for.
const MOST_RETRIES: u8 = 15;

impl Record {
    /// Bytes of a record.
    pub const LEN: usize = 63;

    /// As bytes. Integers are little-endian.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let micros = u32::try_from(self.timeout.as_micros()).unwrap_or(u32::MAX);
        bytes[..4].copy_from_slice(&self.id.0.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.remote_id.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.remote_qpn.get().to_le_bytes());
        bytes[12..28].copy_from_slice(&self.sgid.0);
        bytes[28..44].copy_from_slice(&self.dgid.0);
        bytes[44..48].copy_from_slice(&self.flow_label.to_le_bytes());
        bytes[48..52].copy_from_slice(&micros.to_le_bytes());
        bytes[52..55].copy_from_slice(&[self.traffic_class, self.hop_limit, self.max_retries]);
        bytes[55..59].copy_from_slice(&self.interface.to_le_bytes());
        bytes
    }

    /// Reads bytes from any source; `None` if they are no record.
    #[must_use]
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let word =
            |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("a record is longer"));
        let gid = |at: usize| Gid(*bytes[at..].first_chunk().expect("a record is longer"));
        let qpn = word(8);
        let record = Self {
            id: CommId(word(0)),
            remote_id: CommId(word(4)),
            remote_qpn: Qpn::new(qpn),
            sgid: gid(12),
            dgid: gid(28),
            interface: word(55),
            flow_label: word(44),
            timeout: Duration::from_micros(word(48).into()),
            traffic_class: bytes[52],
            hop_limit: bytes[53],
            max_retries: bytes[54],
        };
        let is_port = |gid: Gid| !gid.is_zero() && !gid.is_multicast();
        let is_sound = !record.id.is_none()
            && !record.remote_id.is_none()
            && qpn == record.remote_qpn.get()
            && is_port(record.sgid)
            && is_port(record.dgid)
            && record.flow_label < 1 << 20
            && (timeout::SHORTEST..=timeout::LONGEST).contains(&record.timeout)
            && record.max_retries <= MOST_RETRIES
            && bytes[59..].iter().all(|byte| *byte == 0);
        is_sound.then_some(record)
    }
}

impl Cm {
    /// The next change of a record: a connection and its record, or `None` if it has none any more.
    pub fn poll_record(&mut self) -> Option<(CommId, Option<Record>)> {
        self.records.pop_front()
    }

    /// Disconnects for a process that has ended and cannot. No event comes of it; when the peer has answered, or the retries
    /// have run out, [`poll_record`](Self::poll_record) says that there is no record any more.
    ///
    /// # Errors
    /// [`CmError::InUse`] where this machine has such an ID, [`CmError::Full`].
    pub fn disconnect_for(&mut self, now: Time, record: &Record) -> Result<(), CmError> {
        let id = record.id;
        if self.connections.contains_key(&id) || self.sidrs.contains(id) {
            return Err(CmError::InUse);
        }
        if self.orphans >= self.config.max_orphans {
            return Err(CmError::Full);
        }
        let Record { sgid, dgid, interface, traffic_class, flow_label, hop_limit, .. } = *record;
        // The queue pairs are no more: of the connection only its names count.
        let qp = QpParams {
            transport: Transport::Rc,
            side: Side::Passive,
            sgid,
            dgid,
            flow_label,
            traffic_class,
            hop_limit,
            sl: 0,
            rate: 0,
            path_mtu: Mtu::Mtu256,
            ack_timeout: 0,
            retry_count: 0,
            rnr_retry_count: 0,
            qpn: None,
            dest_qpn: Some(record.remote_qpn),
            rq_psn: None,
            sq_psn: None,
            responder_resources: 0,
            initiator_depth: 0,
        };
        let connection = Connection {
            state: S::Established,
            orphan: true,
            quiet: true,
            waiting: None,
            local_id: id,
            remote_id: Some(record.remote_id),
            transaction_id: 0,
            to: Destination { sgid, dgid, interface, traffic_class, flow_label, hop_limit },
            qp,
            timeout: record.timeout,
            max_retries: record.max_retries,
            retries: 0,
            attempt: Attempt::default(),
            asked: now,
            deadline: None,
            sent: None,
            answer: None,
            packet_life_time: 0,
            dreq_transaction: 0,
            peer_asks_for: Duration::ZERO,
            named_id: false,
            named_qpn: false,
            is_recorded: true,
            doubt: None,
            unproven: None,
        };
        self.connections.insert(id, Box::new(connection));
        self.orphans += 1;
        self.send_dreq(now, id, PrivateData::EMPTY);
        Ok(())
    }

    /// Tells whether a DREQ went to the peer of a connection that has a record. True also for a connection that does
    /// not exist any more.
    #[must_use]
    pub fn has_told(&self, id: CommId) -> bool {
        let has_left = |c: &Connection| c.state == S::DreqSent && c.attempt.has_left();
        self.connections.get(&id).is_none_or(|c| has_left(c))
    }

    /// Whether this machine has a connection of this name.
    #[must_use]
    pub fn has(&self, id: CommId) -> bool {
        self.connections.contains_key(&id)
    }

    /// The peer may believe in the connection from now on.
    pub(super) fn record(&mut self, id: CommId) {
        let Some(c) = self.connections.get_mut(&id) else { return };
        let (Some(remote_id), Some(remote_qpn)) = (c.remote_id, c.qp.dest_qpn) else { return };
        if !self.config.records || c.is_recorded || c.is_xrc_target() {
            return;
        }
        c.is_recorded = true;
        let Destination { sgid, dgid, interface, traffic_class, flow_label, hop_limit } = c.to;
        let record = Record {
            id,
            remote_id,
            remote_qpn,
            sgid,
            dgid,
            interface,
            traffic_class,
            flow_label,
            hop_limit,
            timeout: c.timeout,
            max_retries: c.max_retries.min(MOST_RETRIES),
        };
        self.records.push_back((id, Some(record)));
    }

    /// The peer knows that it is over, or was told as often as it takes.
    pub(super) fn unrecord(&mut self, id: CommId) {
        if let Some(c) = self.connections.get_mut(&id)
            && std::mem::take(&mut c.is_recorded)
        {
            self.records.push_back((id, None));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            id: CommId(0x0700_0001),
            remote_id: CommId(0xdead_beef),
            remote_qpn: Qpn::new(0xab_cdef),
            sgid: Gid([1; 16]),
            dgid: Gid([2; 16]),
            interface: 0x0102_0304,
            traffic_class: 3,
            flow_label: 0xf_ffff,
            hop_limit: 64,
            timeout: Duration::from_micros(4_300_800),
            max_retries: 15,
        }
    }

    #[test]
    fn a_record_comes_back() {
        assert_eq!(Record::parse(&record().emit()), Some(record()));
    }

    #[test]
    fn invalid_records_are_refused() {
        assert_eq!(Record::parse(&[0; Record::LEN]), None);
        assert_eq!(Record::parse(&[0xff; Record::LEN]), None);
        let bytes = record().emit();
        for (at, bad) in [(11, 1), (47, 1), (51, 0xff), (54, 16), (62, 1), (28, 0xff)] {
            let mut bytes = bytes;
            bytes[at] = bad;
            assert_eq!(Record::parse(&bytes), None, "byte {at}");
        }
        for range in [0..4, 4..8, 12..28, 28..44, 48..52] {
            let mut bytes = bytes;
            bytes[range].fill(0);
            assert_eq!(Record::parse(&bytes), None);
        }
    }
}
