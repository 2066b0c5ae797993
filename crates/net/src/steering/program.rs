//! The classic BPF program that maps a datagram to a socket index.

use std::os::fd::BorrowedFd;
use std::{io, iter};

use crate::sockopt;

/// The map in a program: for each slot the index of its socket.
pub(super) type Map = [Option<u8>; 256];

/// An index that no group has: the kernel then picks a socket by hash.
const BY_HASH: u32 = u32::MAX;

const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const LOAD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const AND: u16 = (libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16;
const JUMP: u16 = (libc::BPF_JMP | libc::BPF_JA) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const RETURN_A: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

/// The place of the slot in a datagram. Offsets are into the UDP payload.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) probe_byte: u8,
    pub(crate) steer_offset: usize,
    pub(crate) by_kind: Option<SteerByKind>,
}

/// Datagrams that say elsewhere than at [`crate::PortOptions::steer_offset`] which process they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteerByKind {
    /// The rule covers datagrams whose four bytes here, big-endian, ...
    pub offset: usize,
    /// ... with these bits counting, ...
    pub mask: u32,
    /// ... are this.
    pub value: u32,
    /// Two bytes, big-endian, that tell the kind of the datagram.
    pub kind_offset: usize,
    /// For each kind the offset of the byte that holds the slot. A datagram of another kind, or for a free slot, goes
    /// to any process. At most 64.
    pub slot_offsets: &'static [(u16, usize)],
}

impl SteerByKind {
    /// Whether a datagram is one of these.
    pub(crate) fn covers(&self, bytes: &[u8]) -> bool {
        bytes
            .get(self.offset..)
            .and_then(<[u8]>::first_chunk)
            .is_some_and(|word| u32::from_be_bytes(*word) & self.mask == self.value)
    }
}

const fn op(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// The program for `map`. A datagram too short for a load goes to index 0.
pub(super) fn build(rules: &Rules, map: &Map) -> Vec<libc::sock_filter> {
    let probe = [
        op(LOAD_BYTE, 0, 0, 0),
        op(JUMP_EQUAL, 0, 2, rules.probe_byte.into()),
        op(LOAD_BYTE, 0, 0, 1),
        op(RETURN_A, 0, 0, 0),
    ];
    let by_kind = rules.by_kind.iter().flat_map(|rule| {
        let n = rule.slot_offsets.len().min(64);
        // Three instructions a kind, one that ends it, and at last the load of all other datagrams' slot.
        let kinds =
            rule.slot_offsets.iter().take(n).enumerate().flat_map(move |(i, &(kind, at))| {
                let behind = 3 * (n - i - 1) + 2;
                [
                    op(JUMP_EQUAL, 0, 2, kind.into()),
                    op(LOAD_BYTE, 0, 0, at as u32),
                    op(JUMP, 0, 0, behind as u32),
                ]
            });
        [
            op(LOAD_WORD, 0, 0, rule.offset as u32),
            op(AND, 0, 0, rule.mask),
            op(JUMP_EQUAL, 0, (3 * n + 2) as u8, rule.value),
            op(LOAD_HALF, 0, 0, rule.kind_offset as u32),
        ]
        .into_iter()
        .chain(kinds)
        .chain(iter::once(op(RETURN, 0, 0, BY_HASH)))
    });
    let chain = map.iter().zip(0u32..).filter_map(|(index, slot)| index.map(|index| (slot, index)));
    probe
        .into_iter()
        .chain(by_kind)
        .chain(iter::once(op(LOAD_BYTE, 0, 0, rules.steer_offset as u32)))
        .chain(
            chain.flat_map(|(slot, index)| {
                [op(JUMP_EQUAL, 0, 1, slot), op(RETURN, 0, 0, index.into())]
            }),
        )
        .chain(iter::once(op(RETURN, 0, 0, BY_HASH)))
        .collect()
}

/// Replaces the program of the group that `fd` belongs to.
///
/// An emulator of user mode (qemu-user) does not have the option. The kernel then picks sockets by hash, and the
/// processes forward what is not theirs.
pub(super) fn attach(fd: BorrowedFd<'_>, program: &[libc::sock_filter]) -> io::Result<()> {
    match sockopt::attach_bpf(fd, libc::SO_ATTACH_REUSEPORT_CBPF, program) {
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
            tracing::debug!("no steering here: SO_ATTACH_REUSEPORT_CBPF is unknown");
            Ok(())
        }
        result => result,
    }
}
