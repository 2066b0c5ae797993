//! Why a work request failed or was refused: a cause, and the values that belong to it.

use std::fmt;
use std::time::Duration;

use anyverbs_causes::Cause;

use crate::memory::Memory;
use crate::mr::{Access, BindError, Finding, Hold, KeyError, MrTable, Unbinding};
use crate::wr::{NoWay, Sge};

/// A cause with its values. `Display` is one clause, in words that suit both ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reason {
    /// The cause.
    pub cause: Cause,
    /// A value, or two of 32 bits; the cause says of what.
    pub value: u64,
    /// The memory that it is about.
    pub memory: Option<MemoryRange>,
    /// The element that it is about, of several of a request: its index, and how many there are.
    pub element: Option<(usize, usize)>,
}

/// A range of memory as a request names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    /// The key.
    pub key: u32,
    /// The first byte.
    pub va: u64,
    /// Bytes.
    pub len: u64,
}

/// The part of a reason that a refusal carries to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// The cause.
    pub cause: Cause,
    /// As in [`Reason`].
    pub value: u64,
}

impl Told {
    /// Bytes on the wire.
    pub const LEN: usize = 10;

    /// The number of the cause, and the value; big-endian.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..2].copy_from_slice(&self.cause.number().to_be_bytes());
        bytes[2..].copy_from_slice(&self.value.to_be_bytes());
        bytes
    }

    /// Reads one. `None` for a cause that is not known here.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let (number, value) = bytes.split_first_chunk()?;
        let cause = Cause::from_number(u16::from_be_bytes(*number))?;
        Some(Self { cause, value: u64::from_be_bytes(value.try_into().ok()?) })
    }
}

/// The end of a connection whose key it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOf {
    Sender,
    Responder,
}

impl Reason {
    /// A cause without values.
    #[must_use]
    pub fn new(cause: Cause) -> Self {
        Self::with(cause, 0)
    }

    /// A cause with its value.
    #[must_use]
    pub fn with(cause: Cause, value: u64) -> Self {
        Self { cause, value, memory: None, element: None }
    }

    /// The protection domains of the memory and of the queue pair, where these differ and both are of this process. The key is used here
    /// as one of this end. They are the lower 24 bits of their numbers.
    pub(crate) fn domains(&self, of: KeyOf) -> Option<[u32; 2]> {
        let is_here = match self.cause {
            Cause::LkeyOfOtherPd => true,
            Cause::RkeyOfOtherPd => of == KeyOf::Responder,
            _ => false,
        };
        is_here.then(|| [self.value >> 32, self.value].map(|n| n as u32 & 0xff_ffff))
    }

    /// The key that it is about, or 0.
    #[must_use]
    pub fn key(&self) -> u32 {
        self.memory.map_or(0, |memory| memory.key)
    }

    /// The reason why a key does not serve; `pd` is that of the queue pair.
    pub(crate) fn of_key(finding: Finding, of: KeyOf, pd: u32, memory: MemoryRange) -> Self {
        use Cause as C;
        let pick = |local, remote| if of == KeyOf::Sender { local } else { remote };
        let (cause, value) = match finding {
            Finding::Unknown => (pick(C::LkeyUnknown, C::RkeyUnknown), 0),
            Finding::Ended(ago) => (pick(C::LkeyDeregistered, C::RkeyDeregistered), ms(ago).into()),
            Finding::WindowEnded(ago) => {
                (pick(C::LkeyDeregistered, C::RkeyDeregistered), pair(OF_WINDOW, ms(ago)))
            }
            Finding::OtherKey(right) => (pick(C::RkeyAsLkey, C::LkeyAsRkey), right.into()),
            Finding::Pd(its) => (pick(C::LkeyOfOtherPd, C::RkeyOfOtherPd), pds(its, pd)),
            Finding::WindowPd(its) => {
                let value = pds(its, pd) | pair(OF_WINDOW, 0);
                (pick(C::LkeyOfOtherPd, C::RkeyOfOtherPd), value)
            }
            Finding::Before(bytes) => (pick(C::LkeyRange, C::RkeyRange), before(bytes)),
            Finding::Behind(bytes) => (pick(C::LkeyRange, C::RkeyRange), bytes),
            Finding::BeforeWindow(bytes) => (C::WindowRange, before(bytes)),
            Finding::BehindWindow(bytes) => (C::WindowRange, bytes),
            Finding::ZeroBased => (pick(C::LkeyZeroBased, C::RkeyZeroBased), 0),
            Finding::Lacks(rights) => (pick(C::LkeyRight, C::RkeyRight), rights.bits().into()),
            Finding::WindowLacks(rights) => (C::WindowRight, rights.bits().into()),
            Finding::Unbound(None) => (C::WindowUnbound, 0),
            Finding::Unbound(Some((by, ago))) => {
                let by = match by {
                    Unbinding::Invalidated => INVALIDATED,
                    Unbinding::QueuePair => QP_ENDED,
                    Unbinding::Region => REGION_ENDED,
                };
                (C::WindowUnbound, pair(by, ms(ago)))
            }
            Finding::Rebound(key) => (C::WindowRebound, key.into()),
            Finding::OtherQp(qpn) => (C::WindowOfOtherQp, qpn.into()),
            Finding::Vanished => (C::Injected, 0),
            Finding::Nothing => (pick(C::LocalMemoryGone, C::PeerMemoryGone), 0),
        };
        Self { memory: Some(memory), ..Self::with(cause, value) }
    }

    /// The same reason, or that the memory, which `find` finds, is there and lacks a permission.
    pub(crate) fn or_protected<'a>(
        self,
        memory: &impl Memory,
        need: Access,
        find: impl FnOnce() -> Result<Hold<'a>, KeyError>,
    ) -> Self {
        let cause = match self.cause {
            Cause::LocalMemoryGone => Cause::LocalMemoryProtected,
            Cause::PeerMemoryGone => Cause::PeerMemoryProtected,
            _ => return self,
        };
        let writes = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let (len, writes) = (self.memory.map_or(0, |memory| memory.len), need.intersects(writes));
        let is_protected = find().is_ok_and(|hold| memory.is_protected(hold.addr(), len, writes));
        if is_protected { Self { cause, ..self } } else { self }
    }

    /// The reason why one of these elements cannot be used.
    #[must_use]
    pub fn of_local(
        (mrs, memory): (&MrTable, &impl Memory),
        sges: &[Sge],
        pd: u32,
        need: Access,
    ) -> Self {
        let place = |sge: &Sge| MemoryRange { key: sge.lkey, va: sge.addr, len: sge.len.into() };
        let reason = |sge: &Sge| {
            let range @ (va, len) = (sge.addr, sge.len.into());
            let finding = mrs.diagnose_local(sge.lkey, pd, range, need);
            Self::of_key(finding, KeyOf::Sender, pd, place(sge))
                .or_protected(memory, need, || mrs.local(sge.lkey, pd, va, len, need))
        };
        let of_several = |n| (sges.len() > 1).then_some((n, sges.len()));
        let reason = |(n, sge): (usize, &Sge)| Self { element: of_several(n), ..reason(sge) };
        let used = || sges.iter().enumerate().filter(|(_, sge)| sge.len > 0);
        used()
            .map(reason)
            .find(|reason| reason.cause != Cause::LocalMemoryGone)
            .or_else(|| used().next().map(reason))
            .unwrap_or(Self::new(Cause::LocalMemoryGone))
    }

    /// The same reason, where the receive came from an SRQ: its protection domain counts.
    #[must_use]
    pub fn from_srq(self) -> Self {
        match self.cause {
            Cause::LkeyOfOtherPd => Self { value: self.value | u64::from(OF_SRQ), ..self },
            _ => self,
        }
    }

    /// The reason why a memory window is not bound.
    pub(crate) fn of_bind(error: BindError) -> Self {
        let value = match error {
            BindError::Access(rights) => pair(LACKS, rights.bits()),
            BindError::Window => pair(NO_WINDOW, 0),
            BindError::Pd => pair(SEVERAL_PDS, 0),
            BindError::State => pair(BOUND_ALREADY, 0),
            BindError::Region => pair(NO_REGION, 0),
            BindError::Range => pair(OUTSIDE, 0),
        };
        Self::with(Cause::WindowNotBound, value)
    }

    /// The part that the peer is told. It sees another status than this end.
    #[must_use]
    pub fn told(&self) -> Told {
        let Self { cause, value, .. } = *self;
        match cause.number() / 100 {
            1 => Told { cause: Cause::PeerMessageTooLong, value },
            4 => Told { cause: Cause::PeerReceiveUnwritable, value: 0 },
            // Nor a key that nobody has given to it.
            _ if matches!(cause, Cause::WindowRebound | Cause::LkeyAsRkey) => {
                Told { cause, value: 0 }
            }
            _ if matches!(cause, Cause::RkeyRange | Cause::WindowRange) => {
                // A peer that guessed the key must not learn where the region lies.
                let len = self.memory.map_or(0, |memory| memory.len);
                let is_near = value.cast_signed().unsigned_abs() <= len;
                Told { cause, value: if is_near { value } else { 0 } }
            }
            _ => Told { cause, value },
        }
    }
}

/// In the upper half of a value: the key is a window's.
const OF_WINDOW: u32 = 1 << 31;

/// In the lower half of the value of [`Cause::LkeyOfOtherPd`]: the protection domain is that of the SRQ.
const OF_SRQ: u32 = 1 << 31;

/// Two protection domains, without the bits that tell processes apart.
fn pds(its: u32, own: u32) -> u64 {
    pair(its & 0xff_ffff, own & 0xff_ffff)
}

/// Kinds of [`Cause::WindowUnbound`], in the upper half of its value; the lower half is milliseconds.
const INVALIDATED: u32 = 1;
const QP_ENDED: u32 = 2;
const REGION_ENDED: u32 = 3;

fn ms(ago: Duration) -> u32 {
    ago.as_millis().try_into().unwrap_or(u32::MAX)
}

/// The value of a range that begins too early.
fn before(bytes: u64) -> u64 {
    bytes.cast_signed().wrapping_neg().cast_unsigned()
}

/// The value of [`Cause::Injected`] if the script is the peer's.
pub(crate) const OF_PEER: u64 = 1;

/// Kinds of [`Cause::WindowNotBound`], in the upper half of its value.
const LACKS: u32 = 1;
const NO_WINDOW: u32 = 2;
const SEVERAL_PDS: u32 = 3;
const BOUND_ALREADY: u32 = 4;
const NO_REGION: u32 = 5;
const OUTSIDE: u32 = 6;

/// The sentences of those that have no further value.
const NOT_BOUND: [(u32, &str); 5] = [
    (NO_WINDOW, "there is no memory window of this key and of the type that the request needs"),
    (SEVERAL_PDS, "window, region and queue pair are not of one protection domain"),
    (
        BOUND_ALREADY,
        "the window of type 2 is bound already, or the length is 0: its invalidation alone unbinds it",
    ),
    (NO_REGION, "the local key of the bind names no region"),
    (OUTSIDE, "the window is not within the region"),
];

/// Two values of 32 bits in one.
pub(crate) fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// The names of rights in C.
struct Rights(u64);

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rights = Access::from_bits_retain(self.0 as u32) & Access::VERBS;
        for (n, (name, _)) in rights.iter_names().enumerate() {
            write!(f, "{}IBV_ACCESS_{name}", if n == 0 { "" } else { " and " })?;
        }
        if rights.is_empty() { write!(f, "access {:#x}", self.0) } else { Ok(()) }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Cause as C;
        let (value, high, low) = (self.value, self.value >> 32, self.value & 0xffff_ffff);
        let is_window = high & u64::from(OF_WINDOW) != 0;
        match self.cause {
            C::MessageTooLong | C::PeerMessageTooLong => {
                write!(f, "the message has {high} bytes or more, and the receive buffer {low}")
            }
            C::MtuDiffers => write!(
                f,
                "path_mtu differs: it is {high} at the responder, and a packet of {low} bytes came"
            ),
            C::QpRight => {
                write!(f, "qp_access_flags of the responder's queue pair lack {}", Rights(value))
            }
            C::TooManyReads => write!(
                f,
                "more READs and atomics are outstanding than max_dest_rd_atomic of the responder, {value}"
            ),
            C::LkeyAsRkey if value != 0 => {
                write!(f, "{}, and the rkey of its region is {value:#x}", self.cause.text())
            }
            C::RkeyAsLkey if value != 0 => {
                write!(f, "{}, and the lkey of its region is {value:#x}", self.cause.text())
            }
            C::LkeyDeregistered | C::RkeyDeregistered if is_window => {
                write!(f, "the memory window of the key was deallocated {low} ms ago")
            }
            C::LkeyDeregistered | C::RkeyDeregistered => {
                write!(f, "the region of the key was deregistered {value} ms ago")
            }
            C::LkeyOfOtherPd | C::RkeyOfOtherPd => {
                let (its, own) = (high & 0xff_ffff, low & 0xff_ffff);
                let what = if is_window { "memory window" } else { "region" };
                let whose = if low & u64::from(OF_SRQ) == 0 { "queue pair" } else { "SRQ" };
                write!(f, "the {what} is of protection domain {its}, and the {whose} of {own}")
            }
            C::LkeyRange | C::RkeyRange | C::WindowRange if value != 0 => {
                let what = if self.cause == C::WindowRange { "memory window" } else { "region" };
                match value.cast_signed() {
                    before @ ..0 => {
                        let bytes = before.unsigned_abs();
                        write!(f, "the range begins {bytes} bytes before the {what}")
                    }
                    behind => write!(f, "the range ends {behind} bytes behind the {what}"),
                }
            }
            C::RkeyRange | C::WindowRange => {
                write!(f, "{} by far; the log of the peer says by how much", self.cause.text())
            }
            C::NoXrcSrq if value != 0 => {
                write!(f, "the XRC domain of the peer has no SRQ {value:#x}")
            }
            C::WindowRight => write!(f, "the memory window lacks {}", Rights(value)),
            C::WindowUnbound => match u32::try_from(high) {
                Ok(INVALIDATED) => write!(f, "the memory window was invalidated {low} ms ago"),
                Ok(QP_ENDED) => write!(
                    f,
                    "the memory window is not bound: its queue pair was reset or destroyed {low} ms ago"
                ),
                Ok(REGION_ENDED) => {
                    write!(f, "the memory window is not bound: its region ended {low} ms ago")
                }
                _ => f.write_str(self.cause.text()),
            },
            C::WindowRebound if value != 0 => {
                write!(f, "the memory window was bound anew, and its key is {value:#x}")
            }
            C::LkeyRight | C::RkeyRight => write!(f, "the region lacks {}", Rights(value)),
            C::WindowNotBound if high == u64::from(LACKS) => {
                write!(f, "the region lacks {}", Rights(low))
            }
            C::WindowNotBound => {
                let known = NOT_BOUND.iter().find(|(kind, _)| u64::from(*kind) == high);
                f.write_str(known.map_or(self.cause.text(), |(_, text)| text))
            }
            C::KeyNotInvalidated if value != 0 => {
                write!(f, "the key {value:#x} cannot be invalidated")
            }
            C::DatagramTooLong if value != 0 => {
                write!(f, "the datagram has {high} bytes, and the MTU is {low}")
            }
            C::QpnDiffers if value != 0 => {
                write!(
                    f,
                    "the peer's queue pair is connected to queue pair {value:#08x}, and not to this one"
                )
            }
            C::FixedLength if value != 0 => {
                write!(f, "the operation has elements of {high} bytes in all, and it takes {low}")
            }
            C::WindowOfOtherQp => {
                write!(f, "the memory window is bound to queue pair {value:#08x}")
            }
            C::BadResponse if value != 0 => write!(
                f,
                "path_mtu differs: it is {high} at the requester, and the peer sent the response in packets of {low} bytes"
            ),
            C::NoReceive => {
                match high {
                    0 => {
                        f.write_str("the peer's program posted no receive within a millisecond")?
                    }
                    _ => write!(f, "the peer's program had no receive posted for {high} ms")?,
                }
                write!(f, ", and rnr_retry is {low}")
            }
            C::NeverAnswered => write!(f, "the peer has never answered, {value} ms long"),
            C::SilentNow => {
                write!(f, "the peer has answered before, and is silent since {value} ms")
            }
            C::PeerEnded if value != 0 => {
                write!(f, "the peer's process (pid {value}) has ended")
            }
            C::NoRoute if NoWay::from_number(value).is_some() => {
                let why = NoWay::from_number(value).map_or("", NoWay::text);
                write!(f, "{}: {why}", self.cause.text())
            }
            C::Injected if value == OF_PEER => {
                f.write_str("a script of faults of the peer's process asked for it")
            }
            C::PsnDiffers => {
                write!(f, "{}, and sq_psn is {value:#x} here", self.cause.text())
            }
            cause => f.write_str(cause.text()),
        }?;
        // A mistake of the request as a whole has nothing to do with the memory.
        let matters = self.cause.number() / 100 != 9 || self.cause == C::Unaligned;
        match self.memory.filter(|_| matters) {
            Some(MemoryRange { key, va, len }) => {
                f.write_str(" (")?;
                if let Some((n, of)) = self.element {
                    write!(f, "sg_list[{n}] of {of}, ")?;
                }
                write!(f, "key {key:#x}, {len} bytes at {va:#x})")
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn what_the_peer_is_told_survives_the_way() {
        for cause in Cause::ALL {
            let told = Told { cause: *cause, value: 0x0102_0304_0506_0708 };
            assert_eq!(Told::from_bytes(&told.to_bytes()), Some(told));
        }
        assert_eq!(Told::from_bytes(&[0xff; Told::LEN]), None);
    }

    /// They run rarely, for their programs are large.
    #[test]
    fn the_scripts_of_failing_rails_wait_for_what_a_peer_is_told() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let has = |file: &str, text: String| {
            let content = std::fs::read_to_string(root.join(file)).unwrap();
            assert!(content.contains(&text), "{file} lacks: {text}");
        };
        let scripts = "conformance/failover/rails.py";
        let reason = Reason::with(Cause::Injected, OF_PEER);
        has(scripts, format!("\nPEERS_RULE = \"{reason}\"\n"));
        has(scripts, format!("\nINJECTED = {}\n", reason.cause.number()));
        has("docs/recipes/nccl.md", format!("vendor_err={}`", reason.cause.number()));
    }

    #[test]
    fn a_peer_does_not_learn_where_a_region_lies() {
        let memory = MemoryRange { key: 0x12, va: 0x1000, len: 64 };
        let told = |finding| Reason::of_key(finding, KeyOf::Responder, 5, memory).told().value;
        assert_eq!((told(Finding::Behind(64)), told(Finding::Behind(65))), (64, 0));
        assert_eq!((told(Finding::Before(64)) as i64, told(Finding::Before(65))), (-64, 0));
        assert_eq!((told(Finding::BehindWindow(64)), told(Finding::BehindWindow(65))), (64, 0));
        assert_eq!(told(Finding::Rebound(0x34)), 0, "nor the key of another bind");
        assert_eq!(told(Finding::OtherKey(0x56)), 0, "nor the right key");
        let reason = Reason { memory: None, ..Reason::new(Cause::RkeyRange) };
        assert!(reason.to_string().starts_with("the range is not within the region by far; "));
    }

    #[test]
    fn the_memory_is_named_where_it_matters() {
        let memory = Some(MemoryRange { key: 0x12, va: 0x1001, len: 8 });
        let text = |cause| Reason { memory, ..Reason::with(cause, pair(512, 1024)) }.to_string();
        let mtu = "path_mtu differs: it is 512 at the responder, and a packet of 1024 bytes came";
        assert_eq!(text(Cause::MtuDiffers), mtu);
        assert!(text(Cause::Unaligned).ends_with("(key 0x12, 8 bytes at 0x1001)"));
    }

    #[test]
    fn the_protection_domain_of_an_srq_is_told_as_such() {
        let memory = MemoryRange { key: 0x12, va: 0x1000, len: 64 };
        // The highest bits of the numbers are those of their process.
        let process = 0xe8 << 24;
        let finding = Finding::Pd(3 | process);
        let reason = Reason::of_key(finding, KeyOf::Sender, 5 | process, memory);
        let text = reason.from_srq().to_string();
        assert!(text.starts_with("the region is of protection domain 3, and the SRQ of 5 ("));
        let text = reason.to_string();
        assert!(text.starts_with("the region is of protection domain 3, and the queue pair of 5"));
    }

    #[test]
    fn the_element_is_named_where_there_are_several() {
        let memory = Some(MemoryRange { key: 0x12, va: 0x1000, len: 64 });
        let text =
            |element| Reason { memory, element, ..Reason::new(Cause::LkeyUnknown) }.to_string();
        assert!(text(None).ends_with(" (key 0x12, 64 bytes at 0x1000)"));
        let of_two = text(Some((1, 2)));
        assert!(of_two.ends_with(" (sg_list[1] of 2, key 0x12, 64 bytes at 0x1000)"), "{of_two}");
    }

    #[test]
    fn a_bind_says_what_it_lacks() {
        let text = |error| Reason::of_bind(error).to_string();
        assert_eq!(text(BindError::Access(Access::MW_BIND)), "the region lacks IBV_ACCESS_MW_BIND");
        let all = [
            BindError::Window,
            BindError::Pd,
            BindError::State,
            BindError::Region,
            BindError::Range,
        ];
        let texts: std::collections::BTreeSet<_> = all.into_iter().map(text).collect();
        assert!(texts.len() == 5 && !texts.contains(Cause::WindowNotBound.text()), "{texts:?}");
    }

    #[test]
    fn the_queue_pair_that_the_peer_is_connected_to_is_named() {
        let text = |value| Reason::with(Cause::QpnDiffers, value).to_string();
        let named =
            "the peer's queue pair is connected to queue pair 0x030011, and not to this one";
        assert_eq!(text(0x03_0011), named);
        assert_eq!(text(0), Cause::QpnDiffers.text());
    }

    #[test]
    fn lengths_stand_in_the_sentence() {
        let text = |cause| Reason::with(cause, pair(2000, 8)).to_string();
        let datagram = "the datagram has 2000 bytes, and the MTU is 8";
        assert_eq!(text(Cause::DatagramTooLong), datagram);
        let fixed = "the operation has elements of 2000 bytes in all, and it takes 8";
        assert_eq!(text(Cause::FixedLength), fixed);
    }

    #[test]
    fn a_short_time_is_no_time_of_zero() {
        let text = |ms| Reason::with(Cause::NoReceive, pair(ms, 3)).to_string();
        let within = "the peer's program posted no receive within a millisecond";
        assert_eq!(text(0), format!("{within}, and rnr_retry is 3"));
        let of = "the peer's program had no receive posted for";
        assert_eq!(text(7), format!("{of} 7 ms, and rnr_retry is 3"));
    }

    #[test]
    fn values_stand_in_the_sentence() {
        let memory = MemoryRange { key: 0x12, va: 0x1000, len: 64 };
        let of = |finding| Reason::of_key(finding, KeyOf::Responder, 5, memory).to_string();
        let place = "(key 0x12, 64 bytes at 0x1000)";
        let ago = Duration::from_millis(7);
        for (finding, text) in [
            (Finding::Behind(96), "the range ends 96 bytes behind the region"),
            (Finding::Before(8), "the range begins 8 bytes before the region"),
            (Finding::Pd(3), "the region is of protection domain 3, and the queue pair of 5"),
            (
                Finding::Lacks(Access::REMOTE_WRITE | Access::LOCAL_WRITE),
                "the region lacks IBV_ACCESS_LOCAL_WRITE and IBV_ACCESS_REMOTE_WRITE",
            ),
            (
                Finding::WindowPd(3),
                "the memory window is of protection domain 3, and the queue pair of 5",
            ),
            (Finding::BehindWindow(96), "the range ends 96 bytes behind the memory window"),
            (
                Finding::WindowLacks(Access::REMOTE_READ),
                "the memory window lacks IBV_ACCESS_REMOTE_READ",
            ),
            (Finding::Unbound(None), "the memory window is not bound"),
            (
                Finding::Unbound(Some((Unbinding::Invalidated, ago))),
                "the memory window was invalidated 7 ms ago",
            ),
            (
                Finding::Unbound(Some((Unbinding::QueuePair, ago))),
                "the memory window is not bound: its queue pair was reset or destroyed 7 ms ago",
            ),
            (
                Finding::Unbound(Some((Unbinding::Region, ago))),
                "the memory window is not bound: its region ended 7 ms ago",
            ),
            (Finding::Rebound(0x34), "the memory window was bound anew, and its key is 0x34"),
            (Finding::Ended(ago), "the region of the key was deregistered 7 ms ago"),
            (Finding::WindowEnded(ago), "the memory window of the key was deallocated 7 ms ago"),
            (Finding::ZeroBased, "the region or window is zero-based: its addresses count from 0"),
            (
                Finding::OtherKey(0x56),
                "a local key stands where a remote key belongs, and the rkey of its region is 0x56",
            ),
        ] {
            assert_eq!(of(finding), format!("{text} {place}"));
        }
    }
}
