//! Dumps: answers of many messages. The socket may have no room for all of one, and the rest follows as its owner receives.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU64, Ordering};

use super::sockets::{entry, inode, is_still, place};
use super::{MESSAGE_MAX, Request, open_file, read_exactly, send_message};
use crate::answer::set_errno;

/// The rest of a socket's dump. Only the thread that has made `socket` [`TAKEN`] uses the rest.
pub(super) struct Rest {
    /// Descriptor and inode of the socket; or 0, or [`TAKEN`].
    socket: AtomicU64,
    /// The descriptor and inode of the file with the messages, as those of a socket. A program may close any descriptor.
    file: AtomicU64,
    offset: AtomicU64,
    /// The sequence number and the kind of the request.
    request: AtomicU64,
    /// The device whose file follows.
    next: AtomicU64,
}

const TAKEN: u64 = u64::MAX;
/// No file follows.
const NONE: u64 = u64::MAX;

/// A dump that is being sent.
struct Dump {
    sequence: u32,
    kind: u16,
    file: Option<c_int>,
    offset: u64,
    /// The device whose file follows, if there is one.
    next: Option<u32>,
}

impl Dump {
    /// Sends as much as the socket has room for. True: that was all.
    fn send(&mut self, fd: c_int) -> bool {
        let request = Request {
            kind: self.kind,
            flags: 0,
            sequence: self.sequence,
            header: &[],
            attributes: &[],
        };
        let mut body = [0; MESSAGE_MAX];
        loop {
            let Some(file) = self.file else {
                let kind = libc::NLMSG_DONE as u16;
                return send_message(fd, kind, libc::NLM_F_MULTI, &request, &[0; 4]);
            };
            // SAFETY: moves the place in a descriptor of this module.
            unsafe { libc::lseek(file, self.offset.cast_signed(), libc::SEEK_SET) };
            let mut len = [0; 4];
            let body = if read_exactly(file, &mut len) {
                body.get_mut(..u32::from_ne_bytes(len) as usize)
            } else {
                None
            };
            let body = body.and_then(|body| read_exactly(file, body).then_some(&*body));
            match body {
                Some(body) if send_message(fd, self.kind, libc::NLM_F_MULTI, &request, body) => {
                    self.offset += (len.len() + body.len()) as u64;
                }
                Some(_) => return false,
                None => {
                    // SAFETY: the descriptor is this module's.
                    unsafe { libc::close(file) };
                    let open = |next| open_file(next, Some((b"c", (self.kind & 0x3ff).into())));
                    self.file = self.next.and_then(open);
                    self.offset = 0;
                    self.next = self.next.filter(|_| self.file.is_some()).map(|next| next + 1);
                }
            }
        }
    }
}

/// Begins a dump of the files of a device, or of those of all devices. Its first file is open.
///
/// False: the socket has a dump already.
pub(super) fn begin(fd: c_int, request: &Request<'_>, file: c_int, next: Option<u32>) -> bool {
    let socket = inode(fd).map_or(TAKEN, |inode| entry(fd, inode));
    let Some(rest) = place(fd).map(|place| &place.rest).filter(|rest| rest.take(0)) else {
        // SAFETY: the descriptor is the caller's, who gives it away.
        unsafe { libc::close(file) };
        return false;
    };
    let (sequence, kind) = (request.sequence, request.kind);
    let dump = Dump { sequence, kind, file: Some(file), offset: 0, next };
    go_on(fd, rest, socket, dump);
    true
}

/// Sends more of the dump of a socket, if there is more. Keeps `errno`.
pub(super) fn feed(fd: c_int) {
    let Some(rest) = place(fd).map(|place| &place.rest) else { return };
    if rest.socket.load(Ordering::Relaxed) == 0 {
        return;
    }
    // SAFETY: libc gives every thread a valid errno.
    let errno = unsafe { *libc::__errno_location() };
    let socket = inode(fd).map_or(TAKEN, |inode| entry(fd, inode));
    // Another thread that receives from it at the same time sends more itself.
    if socket != TAKEN && rest.take(socket) {
        let request = rest.request.load(Ordering::Relaxed);
        let next = rest.next.load(Ordering::Relaxed);
        let dump = Dump {
            sequence: (request >> 16) as u32,
            kind: request as u16,
            file: file_of(rest),
            offset: rest.offset.load(Ordering::Relaxed),
            next: (next != NONE).then_some(next as u32),
        };
        go_on(fd, rest, socket, dump);
    }
    set_errno(errno);
}

/// Sends, and notes the rest.
fn go_on(fd: c_int, rest: &Rest, socket: u64, mut dump: Dump) {
    if dump.send(fd) {
        rest.socket.store(0, Ordering::Release);
        return;
    }
    let file = dump.file.and_then(|file| Some(entry(file, inode(file)?)));
    rest.file.store(file.unwrap_or(0), Ordering::Relaxed);
    rest.offset.store(dump.offset, Ordering::Relaxed);
    let request = u64::from(dump.sequence) << 16 | u64::from(dump.kind);
    rest.request.store(request, Ordering::Relaxed);
    rest.next.store(dump.next.map_or(NONE, u64::from), Ordering::Relaxed);
    rest.socket.store(socket, Ordering::Release);
}

fn file_of(rest: &Rest) -> Option<c_int> {
    let known = rest.file.load(Ordering::Relaxed);
    let file = (known & 0xf_ffff) as c_int;
    (known != 0 && is_still(file, known)).then_some(file)
}

impl Rest {
    /// Makes it this thread's alone, if it is of this socket; 0 stands for none.
    fn take(&self, socket: u64) -> bool {
        self.socket.compare_exchange(socket, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// The socket was closed.
    pub(super) fn drop_of(&self, socket: u64) {
        if self.take(socket) {
            if let Some(file) = file_of(self) {
                // SAFETY: the descriptor is this module's, as its inode says.
                unsafe { libc::close(file) };
            }
            self.socket.store(0, Ordering::Release);
        }
    }
}
