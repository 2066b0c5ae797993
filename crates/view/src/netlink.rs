//! RDMA netlink sockets: the kernel's answers to `rdma(8)` and its like.
//!
//! Such a socket is here a datagram socket that is connected to itself. A request is answered before its `send`
//! returns, from files that the launcher wrote below `<dir>/netlink`. For each device, numbered from 0, there are its
//! attributes as they go into a message (`0/device`), those of its ports (`0/1`), and the messages that answer a command
//! (`0/c17`). Getting devices, ports, resources and counters is answered; any other request gets `EOPNOTSUPP`.

use core::ffi::{c_char, c_int, c_void};
use core::mem::{size_of, transmute, zeroed};

use libc::{iovec, msghdr, nlmsgerr, nlmsghdr, size_t, sockaddr, sockaddr_nl, socklen_t, ssize_t};

use crate::answer::set_errno;
use crate::calls::libc_function;
use crate::{real, tree};

mod dump;
mod sockets;

use sockets::{is_ours, remember};

const NETLINK_RDMA: c_int = 20;
/// `RDMA_NL_NLDEV`, in the upper bits of a message's type; the command is in the lower ten.
const NLDEV: u16 = 5;
const CMD_GET: u16 = 1;
const CMD_PORT_GET: u16 = 5;
/// Resources: a summary, queue pairs, completion queues, memory regions, protection domains.
const CMD_RES_GET: u16 = 9;
const CMD_RES_QP_GET: u16 = 10;
const CMD_RES_CQ_GET: u16 = 12;
const CMD_RES_MR_GET: u16 = 13;
const CMD_RES_PD_GET: u16 = 14;
/// The counters of a port.
const CMD_STAT_GET: u16 = 17;
const ATTR_DEV_INDEX: u16 = 1;
const ATTR_PORT_INDEX: u16 = 3;

/// A message's header.
const HEADER: usize = size_of::<nlmsghdr>();
/// Longest message without its header. `rdma` reads a page at a time.
const MESSAGE_MAX: usize = 4096 - HEADER;
/// Longest request.
const REQUEST_MAX: usize = 4096;

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let real = libc_function!(socket: fn(c_int, c_int, c_int) -> c_int, -1);
    // SAFETY: plain integers.
    let open = |domain, kind, protocol| unsafe { real(domain, kind, protocol) };
    if domain != libc::AF_NETLINK || protocol != NETLINK_RDMA || tree::dir().is_none() {
        return open(domain, kind, protocol);
    }
    let flags = kind & (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK);
    let fd = open(libc::AF_UNIX, libc::SOCK_DGRAM | flags, 0);
    if fd >= 0 && !(connect_to_itself(fd) && remember(fd)) {
        // SAFETY: the descriptor is this function's own.
        unsafe { libc::close(fd) };
        set_errno(libc::ENOBUFS);
        return -1;
    }
    fd
}

fn connect_to_itself(fd: c_int) -> bool {
    let bind = real::bind.address();
    let name = real::getsockname.address();
    if bind.is_null() || name.is_null() {
        return false;
    }
    // SAFETY: libc's functions of these names have these signatures; `sockaddr_un` is plain data, and each call gets its
    // length. A bind with the family alone lets the kernel choose an abstract name.
    unsafe {
        let bind: unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int =
            transmute(bind);
        let getsockname: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int =
            transmute(name);
        let mut address: libc::sockaddr_un = zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        let mut len = size_of::<libc::sockaddr_un>() as socklen_t;
        bind(fd, (&raw const address).cast(), size_of::<libc::sa_family_t>() as socklen_t) == 0
            && getsockname(fd, (&raw mut address).cast(), &raw mut len) == 0
            && libc::connect(fd, (&raw const address).cast(), len) == 0
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    let real = libc_function!(bind: fn(c_int, *const sockaddr, socklen_t) -> c_int, -1);
    if is_ours(fd) {
        return 0;
    }
    // SAFETY: the caller keeps libc's contract.
    unsafe { real(fd, address, len) }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn getsockname(
    fd: c_int,
    address: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let real = libc_function!(getsockname: fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int, -1);
    if is_ours(fd) {
        // SAFETY: the caller passes a buffer and its length.
        unsafe { write_name(address, len, std::process::id()) };
        return 0;
    }
    // SAFETY: the caller keeps libc's contract.
    unsafe { real(fd, address, len) }
}

/// Writes a netlink address, as much of it as there is room for.
///
/// # Safety
/// `address` is null, or `len` points to how many bytes may be written there.
unsafe fn write_name(address: *mut sockaddr, len: *mut socklen_t, port: u32) {
    if address.is_null() || len.is_null() {
        return;
    }
    // SAFETY: `sockaddr_nl` is plain data; the caller promises the room.
    unsafe {
        let mut name: sockaddr_nl = zeroed();
        name.nl_family = libc::AF_NETLINK as u16;
        name.nl_pid = port;
        let room = (*len as usize).min(size_of::<sockaddr_nl>());
        address.cast::<u8>().copy_from_nonoverlapping((&raw const name).cast(), room);
        *len = size_of::<sockaddr_nl>() as socklen_t;
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn send(
    fd: c_int,
    data: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let real = libc_function!(send: fn(c_int, *const c_void, size_t, c_int) -> ssize_t, -1);
    if is_ours(fd) {
        // SAFETY: the caller passes that many bytes.
        return unsafe { take(fd, data, len) };
    }
    // SAFETY: the caller keeps libc's contract.
    unsafe { real(fd, data, len, flags) }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendto(
    fd: c_int,
    data: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    let real = libc_function!(
        sendto: fn(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t, -1
    );
    if is_ours(fd) {
        // SAFETY: the caller passes that many bytes.
        return unsafe { take(fd, data, len) };
    }
    // SAFETY: the caller keeps libc's contract.
    unsafe { real(fd, data, len, flags, to, to_len) }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn sendmsg(
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    let real = libc_function!(sendmsg: fn(c_int, *const msghdr, c_int) -> ssize_t, -1);
    if !is_ours(fd) || message.is_null() {
        // SAFETY: the caller keeps libc's contract.
        return unsafe { real(fd, message, flags) };
    }
    let mut request = [0; REQUEST_MAX];
    let mut len = 0usize;
    // SAFETY: the caller passes a message whose pieces are mapped.
    unsafe {
        for i in 0..(*message).msg_iovlen {
            let iovec { iov_base, iov_len } = *(*message).msg_iov.add(i);
            let end = len.checked_add(iov_len);
            let Some(to) = end.and_then(|end| request.get_mut(len..end)) else {
                set_errno(libc::EMSGSIZE);
                return -1;
            };
            to.as_mut_ptr().copy_from_nonoverlapping(iov_base.cast(), iov_len);
            len += iov_len;
        }
    }
    answer(fd, &request[..len]);
    len as ssize_t
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvfrom(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    let real = libc_function!(
        recvfrom: fn(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t, -1
    );
    if !is_ours(fd) {
        // SAFETY: the caller keeps libc's contract.
        return unsafe { real(fd, data, len, flags, from, from_len) };
    }
    // SAFETY: as above; the sender's name is the kernel's, port 0.
    unsafe {
        dump::feed(fd);
        let got = real(fd, data, len, flags, core::ptr::null_mut(), core::ptr::null_mut());
        if got >= 0 {
            dump::feed(fd);
            write_name(from, from_len, 0);
        }
        got
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    let real = libc_function!(recvmsg: fn(c_int, *mut msghdr, c_int) -> ssize_t, -1);
    if !is_ours(fd) || message.is_null() {
        // SAFETY: the caller keeps libc's contract.
        return unsafe { real(fd, message, flags) };
    }
    // SAFETY: the caller passes a message with room for a name, of the length that it says.
    unsafe {
        let (name, mut name_len) = ((*message).msg_name, (*message).msg_namelen);
        dump::feed(fd);
        let got = real(fd, message, flags);
        if got >= 0 {
            dump::feed(fd);
        }
        if got >= 0 && !name.is_null() {
            write_name(name.cast(), &raw mut name_len, 0);
            (*message).msg_namelen = name_len;
        }
        got
    }
}

/// # Safety
/// As the libc function of this name.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn recv(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    let real = libc_function!(recv: fn(c_int, *mut c_void, size_t, c_int) -> ssize_t, -1);
    if !is_ours(fd) {
        // SAFETY: the caller keeps libc's contract.
        return unsafe { real(fd, data, len, flags) };
    }
    dump::feed(fd);
    // SAFETY: as above.
    let got = unsafe { real(fd, data, len, flags) };
    if got >= 0 {
        dump::feed(fd);
    }
    got
}

/// Takes a request.
///
/// # Safety
/// `data` points to `len` bytes.
unsafe fn take(fd: c_int, data: *const c_void, len: size_t) -> ssize_t {
    let mut request = [0; REQUEST_MAX];
    let Some(to) = request.get_mut(..len) else {
        set_errno(libc::EMSGSIZE);
        return -1;
    };
    // SAFETY: the caller's promise; the ranges are apart.
    unsafe { to.as_mut_ptr().copy_from_nonoverlapping(data.cast(), len) };
    answer(fd, to);
    len as ssize_t
}

/// One request (`struct nlmsghdr` and its attributes).
struct Request<'a> {
    kind: u16,
    flags: c_int,
    sequence: u32,
    header: &'a [u8],
    attributes: &'a [u8],
}

/// Answers the requests of one datagram.
fn answer(fd: c_int, mut datagram: &[u8]) {
    while let Some((request, rest)) = next_request(datagram) {
        datagram = rest;
        let is_dump = request.flags & libc::NLM_F_DUMP == libc::NLM_F_DUMP;
        let status = match (request.kind >> 10 == NLDEV).then_some(request.kind & 0x3ff) {
            Some(CMD_GET) if is_dump => {
                let mut index = 0;
                while send_attributes(fd, &request, index, None) {
                    index += 1;
                }
                0
            }
            Some(CMD_GET) => match request.attribute(ATTR_DEV_INDEX) {
                Some(index) if send_attributes(fd, &request, index, None) => 0,
                Some(_) => -libc::ENODEV,
                None => -libc::EINVAL,
            },
            Some(CMD_PORT_GET) if is_dump => match request.attribute(ATTR_DEV_INDEX) {
                Some(index) => {
                    tree::refresh();
                    let mut port = 1;
                    while send_attributes(fd, &request, index, Some(port)) {
                        port += 1;
                    }
                    0
                }
                None => -libc::EINVAL,
            },
            Some(CMD_PORT_GET) => {
                tree::refresh();
                match (request.attribute(ATTR_DEV_INDEX), request.attribute(ATTR_PORT_INDEX)) {
                    (Some(index), Some(port))
                        if send_attributes(fd, &request, index, Some(port)) =>
                    {
                        0
                    }
                    _ => -libc::EINVAL,
                }
            }
            Some(
                command @ (CMD_RES_GET | CMD_RES_QP_GET | CMD_RES_CQ_GET | CMD_RES_MR_GET
                | CMD_RES_PD_GET | CMD_STAT_GET),
            ) => {
                tree::refresh();
                let wanted = request.attribute(ATTR_DEV_INDEX);
                let file = || open_file(wanted.unwrap_or(0), Some((b"c", command.into())));
                match (wanted, is_dump) {
                    (None, false) => -libc::EINVAL,
                    (_, true) => match file() {
                        Some(file) => {
                            let next = if wanted.is_none() { Some(1) } else { None };
                            // It ends itself, if it begins.
                            if dump::begin(fd, &request, file, next) {
                                continue;
                            }
                            -libc::EBUSY
                        }
                        None if wanted.is_none() => 0,
                        None => -libc::ENODEV,
                    },
                    (Some(_), false) => match file() {
                        // Counters are of a port, and the others of the device.
                        Some(file) => {
                            let port = request.attribute(ATTR_PORT_INDEX).unwrap_or(1);
                            send_one(
                                fd,
                                &request,
                                file,
                                if command == CMD_STAT_GET { port } else { 1 },
                            )
                        }
                        None => -libc::ENODEV,
                    },
                }
            }
            _ => -libc::EOPNOTSUPP,
        };
        if is_dump && status == 0 {
            send_message(fd, libc::NLMSG_DONE as u16, libc::NLM_F_MULTI, &request, &[0; 4]);
        } else if status != 0 || request.flags & libc::NLM_F_ACK != 0 {
            let mut body = [0; size_of::<nlmsgerr>()];
            body[..4].copy_from_slice(&status.to_ne_bytes());
            body[4..].copy_from_slice(request.header);
            send_message(fd, libc::NLMSG_ERROR as u16, 0, &request, &body);
        }
    }
}

/// The first request of a datagram, and the rest.
fn next_request(datagram: &[u8]) -> Option<(Request<'_>, &[u8])> {
    let header = datagram.first_chunk::<HEADER>()?;
    let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
    let attributes = datagram.get(HEADER..len)?;
    let request = Request {
        kind: u16::from_ne_bytes([header[4], header[5]]),
        flags: u16::from_ne_bytes([header[6], header[7]]).into(),
        sequence: u32::from_ne_bytes([header[8], header[9], header[10], header[11]]),
        header: &datagram[..HEADER],
        attributes,
    };
    Some((request, datagram.get(len.next_multiple_of(4)..).unwrap_or_default()))
}

impl Request<'_> {
    /// An attribute of 32 bits.
    fn attribute(&self, wanted: u16) -> Option<u32> {
        let mut rest = self.attributes;
        loop {
            let header = rest.first_chunk::<4>()?;
            let len = usize::from(u16::from_ne_bytes([header[0], header[1]]));
            let value = rest.get(4..len)?;
            // The two highest bits are flags.
            if u16::from_ne_bytes([header[2], header[3]]) & 0x3fff == wanted {
                return value.try_into().ok().map(u32::from_ne_bytes);
            }
            rest = rest.get(len.next_multiple_of(4)..)?;
        }
    }
}

/// Sends the attributes of a device or a port. False if there is none of that number.
fn send_attributes(fd: c_int, request: &Request<'_>, device: u32, port: Option<u32>) -> bool {
    let mut body = [0; MESSAGE_MAX];
    let Some(len) = read_attributes(device, port, &mut body) else { return false };
    let is_dump = request.flags & libc::NLM_F_DUMP == libc::NLM_F_DUMP;
    let flags = if is_dump { libc::NLM_F_MULTI } else { 0 };
    send_message(fd, request.kind, flags, request, &body[..len]);
    true
}

/// Sends a message of a file, which it closes, by its number from 1. A full socket loses it, as netlink's do. Returns the status of the
/// request.
fn send_one(fd: c_int, request: &Request<'_>, file: c_int, number: u32) -> c_int {
    let mut body = [0; MESSAGE_MAX];
    let mut found = None;
    for _ in 0..number {
        let mut len = [0; 4];
        found = if read_exactly(file, &mut len) {
            body.get_mut(..u32::from_ne_bytes(len) as usize)
        } else {
            None
        };
        found = found.and_then(|body| read_exactly(file, body).then_some(body));
        if found.is_none() {
            break;
        }
    }
    // SAFETY: the descriptor is the caller's, who gives it away.
    unsafe { libc::close(file) };
    match found {
        Some(body) => {
            send_message(fd, request.kind, 0, request, body);
            0
        }
        None => -libc::EINVAL,
    }
}

fn read_exactly(file: c_int, into: &mut [u8]) -> bool {
    let mut done = 0;
    while done < into.len() {
        // SAFETY: live bytes, as many as there are left.
        let n = unsafe { libc::read(file, into[done..].as_mut_ptr().cast(), into.len() - done) };
        match usize::try_from(n) {
            Ok(n @ 1..) => done += n,
            _ => return false,
        }
    }
    true
}

fn read_attributes(device: u32, port: Option<u32>, into: &mut [u8]) -> Option<usize> {
    let file = open_file(device, port.map(|port| (&b""[..], port)))?;
    // SAFETY: read gets the room that there is; the descriptor is this function's own.
    unsafe {
        let len = libc::read(file, into.as_mut_ptr().cast(), into.len());
        libc::close(file);
        usize::try_from(len).ok()
    }
}

/// Opens a file of a device, its own or that of a letter and a number.
fn open_file(device: u32, name: Option<(&[u8], u32)>) -> Option<c_int> {
    let dir = tree::dir()?;
    let mut path = [0u8; 1200];
    let mut end = 0;
    let mut push = |bytes: &[u8]| {
        path[end..end + bytes.len()].copy_from_slice(bytes);
        end += bytes.len();
    };
    let mut digits = [0; 10];
    push(dir);
    push(b"/netlink/");
    push(decimal(device, &mut digits));
    push(b"/");
    match name {
        None => push(b"device"),
        Some((letter, number)) => {
            push(letter);
            push(decimal(number, &mut digits));
        }
    }
    // SAFETY: the path is NUL-terminated (it began as zeros, and fits: a directory is shorter than 1024 bytes).
    let file =
        unsafe { libc::open(path.as_ptr().cast::<c_char>(), libc::O_RDONLY | libc::O_CLOEXEC) };
    (file >= 0).then_some(file)
}

fn decimal(mut number: u32, into: &mut [u8; 10]) -> &[u8] {
    let mut at = into.len();
    loop {
        at -= 1;
        into[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &into[at..];
        }
    }
}

/// Puts a message into the socket, for its owner to receive. False: it has no room now, and other messages wait there.
fn send_message(fd: c_int, kind: u16, flags: c_int, request: &Request<'_>, body: &[u8]) -> bool {
    let mut message = [0; HEADER + MESSAGE_MAX];
    let len = HEADER + body.len();
    message[..4].copy_from_slice(&(len as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&kind.to_ne_bytes());
    message[6..8].copy_from_slice(&(flags as u16).to_ne_bytes());
    message[8..12].copy_from_slice(&request.sequence.to_ne_bytes());
    message[HEADER..len].copy_from_slice(body);
    let send = real::send.address();
    if send.is_null() {
        return true;
    }
    // SAFETY: libc's function of this name has this signature.
    unsafe {
        let send: unsafe extern "C" fn(c_int, *const c_void, size_t, c_int) -> ssize_t =
            transmute(send);
        send(fd, message.as_ptr().cast(), len, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) >= 0
            || *libc::__errno_location() != libc::EAGAIN
    }
}
