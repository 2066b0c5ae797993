//! The classic BPF program that maps a datagram to a socket index.

use std::os::fd::BorrowedFd;
use std::{io, iter};

use crate::sockopt;

/// What a program says: for each slot the index of its socket.
pub(super) type Map = [Option<u8>; 256];

/// An index that no group has: the kernel then picks a socket by hash.
const BY_HASH: u32 = u32::MAX;

const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const RETURN_A: u16 = (libc::BPF_RET | libc::BPF_A) as u16;

/// The program for `map`. Offsets are into the UDP payload; a datagram too short for a load goes to index 0.
pub(super) fn build(probe_byte: u8, steer_offset: usize, map: &Map) -> Vec<libc::sock_filter> {
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let probe = [
        op(LOAD_BYTE, 0, 0, 0),
        op(JUMP_EQUAL, 0, 2, probe_byte.into()),
        op(LOAD_BYTE, 0, 0, 1),
        op(RETURN_A, 0, 0, 0),
        op(LOAD_BYTE, 0, 0, steer_offset as u32),
    ];
    let chain = map.iter().zip(0u32..).filter_map(|(index, slot)| index.map(|index| (slot, index)));
    probe
        .into_iter()
        .chain(
            chain.flat_map(|(slot, index)| {
                [op(JUMP_EQUAL, 0, 1, slot), op(RETURN, 0, 0, index.into())]
            }),
        )
        .chain(iter::once(op(RETURN, 0, 0, BY_HASH)))
        .collect()
}

/// Replaces the program of the group that `fd` belongs to.
pub(super) fn attach(fd: BorrowedFd<'_>, program: &[libc::sock_filter]) -> io::Result<()> {
    sockopt::attach_bpf(fd, libc::SO_ATTACH_REUSEPORT_CBPF, program)
}
