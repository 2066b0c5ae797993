//! I/O maps: memory of the program that its peer writes without its doing (`riomap`, `riowrite` of `rsocket(7)`).

use std::collections::VecDeque;
use std::time::Instant;

use anyverbs::{Access, Mr, RemoteAddr};
use parking_lot::MutexGuard;

use super::Stream;
use super::connection::Connection;
use crate::errno::{Errno, Result};
use crate::machine::Machine;
use crate::ring::Cursor;
use crate::wire::{ByteOrder, IoMapEntry, SGL_LEN, Target};

/// Memory that the program mapped.
#[derive(Debug)]
struct Map {
    mr: Mr,
    addr: u64,
    len: u64,
    offset: u64,
    /// Entry of the peer's map; none where the peer may not write.
    index: Option<u16>,
}

/// The maps of a socket.
#[derive(Debug, Default)]
pub(super) struct IoMaps {
    maps: Vec<Map>,
    /// Entries that the peer was not told of yet.
    queue: VecDeque<u16>,
}

impl IoMaps {
    fn free_index(&self, len: u32) -> Option<u16> {
        (0..u16::try_from(len).unwrap_or(u16::MAX))
            .find(|i| self.maps.iter().all(|map| map.index != Some(*i)))
    }
}

impl Stream {
    /// `riomap`: registers memory, under `offset` or, where that is none, its address. The peer learns of it before the
    /// next data.
    ///
    /// # Safety
    /// As for [`anyverbs::Pd::reg_mr`], until the map is removed or the socket closed.
    pub(crate) unsafe fn map(
        &self,
        addr: u64,
        len: u64,
        writable: bool,
        offset: Option<u64>,
    ) -> Result<u64> {
        // An accepted socket knows its peer before the connection is there.
        let accepted = self.connection.get().filter(|c| c.core.lock().connected);
        let connection = match accepted {
            Some(connection) => connection,
            None => self.established(self.is_nonblocking(), None)?,
        };
        let mut maps = self.maps.lock();
        let index = if writable {
            let room = connection.core.lock().sender.iomap_len();
            Some(maps.free_index(room).ok_or(Errno(libc::ENOMEM))?)
        } else {
            None
        };
        if len > u32::MAX.into() {
            return Err(Errno(libc::EINVAL));
        }
        let remote = if writable { Access::REMOTE_WRITE } else { Access::empty() };
        // SAFETY: the caller's promise.
        let mr =
            unsafe { connection.device.pd.reg_mr(addr, len, addr, Access::LOCAL_WRITE | remote) }?;
        let offset = offset.unwrap_or(addr);
        maps.maps.push(Map { mr, addr, len, offset, index });
        maps.queue.extend(index);
        Ok(offset)
    }

    /// `riounmap`. The peer is not told. Its later writes there are refused, and end the connection.
    pub(crate) fn unmap(&self, addr: u64, len: u64) -> Result<()> {
        let mut maps = self.maps.lock();
        let found = maps.maps.iter().position(|map| (map.addr, map.len) == (addr, len));
        let map = maps.maps.remove(found.ok_or(Errno(libc::EINVAL))?);
        maps.queue.retain(|index| Some(*index) != map.index);
        drop(maps);
        Ok(map.mr.destroy()?)
    }

    /// Tells the peer of new maps. False: there is no room now. With `send` held.
    pub(super) fn send_maps(&self, connection: &Connection) -> Result<bool> {
        let mut maps = self.maps.lock();
        while let Some(&index) = maps.queue.front() {
            let (piece, order) = {
                let mut core = connection.core.lock();
                if !core.writable {
                    drop(core);
                    return Err(self.broken(connection));
                }
                (core.sender.plan_map_entry(index), core.peer_order())
            };
            let Some(piece) = piece else { return Ok(false) };
            maps.queue.pop_front();
            let Some(map) = maps.maps.iter().find(|map| map.index == Some(index)) else { continue };
            let target = Target { addr: map.addr, key: map.mr.rkey(), len: map.len as u32 };
            let bytes = IoMapEntry { offset: map.offset, target }.encode(order);
            let buffer =
                libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            let buffers = [buffer];
            // SAFETY: a live array that is only read.
            let mut from = unsafe { Cursor::new(&buffers) }?;
            if let Err(errno) = connection.post_piece(&piece, &mut from) {
                connection.core.lock().sender.cancel(&piece);
                connection.fail(errno.0);
                return Err(errno);
            }
        }
        Ok(true)
    }

    /// The peer's map at an offset.
    fn find(connection: &Connection, offset: u64) -> Option<IoMapEntry> {
        (0..usize::from(connection.iomap_len))
            .map(|i| {
                let at = SGL_LEN * Target::LEN + i * IoMapEntry::LEN;
                IoMapEntry::decode(&connection.table.read(at), ByteOrder::NATIVE)
            })
            .find(|entry| {
                offset.checked_sub(entry.offset).is_some_and(|at| at < entry.target.len.into())
            })
    }

    /// `riowrite`: writes into the peer's map at `offset`; less than all where the map ends.
    pub(crate) fn write_mapped(
        &self,
        mut from: Cursor<'_>,
        mut offset: u64,
        flags: i32,
    ) -> Result<usize> {
        let nonblocking = self.is_nonblocking() || flags & libc::MSG_DONTWAIT != 0;
        let timeout = self.options.lock().send_timeout;
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let connection = self.established(nonblocking, deadline)?;
        let total = from.left();
        let mut turn = connection.send.lock();
        while from.left() > 0 {
            let done = total - from.left();
            let told = self.send_maps(connection)?;
            let piece = if told {
                let Some(entry) = Self::find(connection, offset).or_else(|| {
                    // The entry may have come and not been looked for.
                    connection.progress();
                    Self::find(connection, offset)
                }) else {
                    break;
                };
                let at = offset - entry.offset;
                let left = u64::from(entry.target.len) - at;
                let want = from.left().min(usize::try_from(left).unwrap_or(usize::MAX));
                let va = entry.target.addr.wrapping_add(at);
                let mut core = connection.core.lock();
                if !core.writable {
                    drop(core);
                    let errno = self.broken(connection);
                    return if done > 0 { Ok(done) } else { Err(errno) };
                }
                core.sender.plan_direct(want, RemoteAddr { va, rkey: entry.target.key })
            } else {
                None
            };
            if let Some(piece) = piece {
                let before = from.clone();
                if let Err(errno) = connection.post_piece(&piece, &mut from) {
                    from = before;
                    connection.core.lock().sender.cancel(&piece);
                    // Another thread may have found no room while the piece had it.
                    self.sleepers.wake();
                    if errno.0 != libc::EFAULT {
                        connection.fail(errno.0);
                    }
                    let done = total - from.left();
                    return if done > 0 { Ok(done) } else { Err(errno) };
                }
                offset = offset.wrapping_add(piece.len.into());
                continue;
            }
            connection.progress();
            let has_room = |core: &Machine| {
                let room = if told { core.sender.has_room() } else { core.sender.can_send() };
                room || !core.writable
            };
            if has_room(&connection.core.lock()) {
                continue;
            }
            let waited = if nonblocking {
                Err(Errno(libc::EAGAIN))
            } else {
                MutexGuard::unlocked(&mut turn, || self.wait(connection, deadline, has_room))
            };
            match waited {
                Ok(()) => {}
                Err(_) if done > 0 => return Ok(done),
                Err(errno) => return Err(errno),
            }
        }
        Ok(total - from.left())
    }
}
