//! The handshake of the same-host link with a process that sends any bytes and descriptors, as the side that connects and
//! as the side that is connected to. An honest process is still served in the end, and no descriptor stays.

use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyverbs_net::Slot;
use anyverbs_net::host::Registry;
use anyverbs_net::shm::{Channel, Config, Endpoint, MAX_HEADER, Poller};

use super::input::Input;

const MAX_STEPS: usize = 64;
/// The slots of the victim and of an honest process, and the one that the input speaks for.
const VICTIM: u8 = 1;
const HONEST: u8 = 2;
const FORGER: u8 = 3;
/// Bytes of a hello, and where it says for which slot.
const HELLO: usize = 72;
const SLOT_AT: usize = 60;

/// A process as far as the link is concerned.
struct Party {
    endpoint: Endpoint,
    poller: Poller,
    received: usize,
}

impl Party {
    fn new(slot: &Slot) -> Self {
        let config = Config { ring: 64 << 10, max_payload: 4096, published: 4096 };
        let (endpoint, poller) = Endpoint::new(slot, config).expect("an endpoint");
        Self { endpoint, poller, received: 0 }
    }

    fn turn(&mut self) {
        self.endpoint.control().expect("it is the other's fault");
        let received = &mut self.received;
        self.poller.poll(|channel, batch| {
            for message in batch {
                let mut header = [0; MAX_HEADER];
                message.header(&mut header);
                assert!(message.payload_len() <= channel.max_payload());
                let mut payload = vec![0; message.payload_len()];
                message.read_payload(0, &mut payload);
                *received += usize::from(channel.slot() == HONEST && payload == b"honest");
            }
        });
        while self.poller.next_event().is_some() {}
    }
}

/// The process that the input speaks for.
struct Forger {
    name: String,
    listener: OwnedFd,
    sockets: Vec<OwnedFd>,
    /// The descriptors that it can send: its own, and those that it got.
    fds: Vec<OwnedFd>,
    /// A hello of this version.
    hello: [u8; HELLO],
}

/// Runs one input.
pub fn run(input: &[u8]) {
    static SLOTS: OnceLock<Mutex<(String, Slot, Slot)>> = OnceLock::new();
    let slots = SLOTS.get_or_init(|| {
        let name = format!("fuzz-shm-{}", std::process::id());
        let registry = Registry::new(&name).expect("a valid name");
        let claim = |number| Slot::claim_number(&registry, number).expect("it is free");
        Mutex::new((name, claim(VICTIM), claim(HONEST)))
    });
    let slots = slots.lock().unwrap_or_else(PoisonError::into_inner);
    let before = open_descriptors();
    exchange(&slots.0, &slots.1, &slots.2, &mut Input(input));
    assert_eq!(open_descriptors(), before, "descriptors stay open");
}

fn exchange(name: &str, victim: &Slot, honest: &Slot, input: &mut Input<'_>) {
    let mut victim = Party::new(victim);
    let mut forger = Forger::new(name);
    let mut channels = vec![victim.endpoint.connect(FORGER).expect("it listens")];
    forger.accept();
    forger.receive(0);
    forger.hello[SLOT_AT] = FORGER;
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        step(input, &mut victim, &mut forger, &mut channels);
    }
    forger.end();
    drop(channels);
    let mut honest = Party::new(honest);
    let channel = honest.endpoint.connect(VICTIM).expect("the victim listens");
    send(&channel, b"honest");
    let mut rounds = 0;
    while victim.received == 0 || !channel.is_established() {
        victim.turn();
        honest.turn();
        rounds += 1;
        assert!(rounds < 10_000, "an honest process is not served");
    }
}

fn step(
    input: &mut Input<'_>,
    victim: &mut Party,
    forger: &mut Forger,
    channels: &mut Vec<Arc<Channel>>,
) {
    match input.byte() % 16 {
        0 | 1 => forger.dial(),
        2..6 => forger.send(input),
        6..9 => victim.turn(),
        9 => {
            channels.extend(victim.endpoint.connect(FORGER));
            channels.truncate(8);
            forger.accept();
        }
        10 => forger.receive(input.byte().into()),
        11 => {
            let which = usize::from(input.byte());
            if which < forger.sockets.len() {
                forger.sockets.swap_remove(which);
            }
        }
        12 | 13 => {
            // A word somewhere in what it shares.
            let which = usize::from(input.byte()) % forger.fds.len();
            let at = i64::from(input.word()) * 8;
            let word = [input.byte(), input.byte(), input.byte(), 0, 0, 0, 0, input.byte()];
            // SAFETY: eight live bytes. An error is one more thing that it cannot do.
            unsafe {
                libc::pwrite(forger.fds[which].as_raw_fd(), word.as_ptr().cast(), word.len(), at);
            }
        }
        14 => {
            let which = usize::from(input.byte()) % channels.len();
            send(&channels[which], &[7; 64]);
        }
        _ => {
            let channel = &channels[usize::from(input.byte()) % channels.len()];
            let _ = channel.can_copy();
            if let Some(copying) = channel.begin_copy() {
                let _ = copying.published(8 * usize::from(input.word()));
            }
        }
    }
}

fn send(channel: &Arc<Channel>, payload: &[u8]) {
    let mut sender = channel.sender();
    if let Ok(mut reservation) = sender.reserve(0, payload.len()) {
        reservation.write_payload(0, payload);
        reservation.commit();
        sender.flush();
    }
}

impl Forger {
    fn new(name: &str) -> Self {
        let listener = socket();
        let (address, len) = address(name, FORGER);
        // SAFETY: a live address with its length.
        let bound = unsafe { libc::bind(listener.as_raw_fd(), (&raw const address).cast(), len) };
        // SAFETY: a plain call.
        let listens = unsafe { libc::listen(listener.as_raw_fd(), 64) };
        assert_eq!((bound, listens), (0, 0));
        let mut pipe = [0; 2];
        // SAFETY: two integers to fill.
        assert_eq!(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
        let mut fds = Vec::from(pipe.map(owned));
        for (len, seals) in [(4096, libc::F_SEAL_SHRINK), (4096, 0), (2 * 69_632, 2), (1, 2)] {
            let flags = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC;
            // SAFETY: a terminated name.
            let fd = owned(unsafe { libc::memfd_create(c"forged".as_ptr(), flags) });
            // SAFETY: plain calls on our own descriptor.
            unsafe {
                libc::ftruncate(fd.as_raw_fd(), len);
                libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals);
            }
            fds.push(fd);
        }
        // SAFETY: flags only.
        fds.push(owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) }));
        let name = name.to_owned();
        Self { name, listener, sockets: Vec::new(), fds, hello: [0; HELLO] }
    }

    /// Ends, and with it the copies that it says it makes. Here the honest process has the same process ID, so the victim
    /// would take these for its own.
    fn end(self) {
        const SIDE: i64 = 4096 + (64 << 10);
        const MARKS_AT: i64 = 512;
        let no_marks = [0u8; 4096 - MARKS_AT as usize];
        for fd in &self.fds {
            for at in [MARKS_AT, SIDE + MARKS_AT] {
                let (bytes, len) = (no_marks.as_ptr().cast(), no_marks.len());
                // SAFETY: live bytes. Only the object of a ring lets it write there.
                unsafe { libc::pwrite(fd.as_raw_fd(), bytes, len, at) };
            }
        }
    }

    fn keep(&mut self, socket: OwnedFd) {
        self.sockets.push(socket);
        if self.sockets.len() > 80 {
            self.sockets.remove(0);
        }
    }

    fn dial(&mut self) {
        let socket = socket();
        let (address, len) = address(&self.name, VICTIM);
        // SAFETY: a live address with its length.
        if unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) } == 0 {
            self.keep(socket);
        }
    }

    fn accept(&mut self) {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        // SAFETY: no address is asked for.
        let fd = unsafe {
            libc::accept4(
                self.listener.as_raw_fd(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                flags,
            )
        };
        if fd >= 0 {
            self.keep(owned(fd));
        }
    }

    /// A hello or an answer with some bytes changed, with any descriptors, or any bytes at all.
    fn send(&mut self, input: &mut Input<'_>) {
        if self.sockets.is_empty() {
            return;
        }
        let socket = &self.sockets[usize::from(input.byte()) % self.sockets.len()];
        let mut bytes = self.hello.to_vec();
        let how = input.byte();
        for _ in 0..how & 3 {
            let at = usize::from(input.byte()) % HELLO;
            bytes[at] = input.byte();
        }
        if how & 0x30 == 0x30 {
            bytes.resize(usize::from(input.byte()) % 100, 0);
        }
        // The first that it got are those of the victim's hello: ring, epoch, doorbells, pipe and published memory.
        let count = match how >> 6 {
            0 => 5,
            1 => 4,
            _ => usize::from(input.byte()) % 8,
        };
        let first = self.fds.len().min(7) + 5 - count;
        let fds: Vec<i32> = (0..count)
            .map(|n| {
                let other = usize::from(input.byte());
                let at = if other < 200 { first + n } else { other };
                self.fds[at % self.fds.len()].as_raw_fd()
            })
            .collect();
        post(socket, &bytes, &fds);
    }

    /// Takes what the victim says, with the descriptors.
    fn receive(&mut self, which: usize) {
        let Some(socket) = self.sockets.get(which) else { return };
        let mut bytes = [0u8; HELLO];
        let mut control = [0u64; 16];
        let mut iov = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: HELLO };
        // SAFETY: integers and pointers, for which zero is valid.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
        // SAFETY: the header describes live buffers; the kernel's descriptors become ours.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
        let mut fds = Vec::new();
        // SAFETY: as above. One control message at most comes: its length, then its descriptors.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            if got > 0 && !header.is_null() && (*header).cmsg_type == libc::SCM_RIGHTS {
                let count = ((*header).cmsg_len - libc::CMSG_LEN(0) as usize) / 4;
                let first = libc::CMSG_DATA(header).cast::<i32>();
                fds.extend((0..count).map(|n| owned(first.add(n).read_unaligned())));
            }
        }
        if self.hello == [0; HELLO] {
            self.hello = bytes;
        }
        self.fds.extend(fds);
        self.fds.truncate(64);
    }
}

fn post(socket: &OwnedFd, bytes: &[u8], fds: &[i32]) {
    let mut control = [0u64; 16];
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: integers and pointers, for which zero is valid.
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the buffer has room for 8 descriptors; the header lies at its beginning.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(4 * fds.len() as u32) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(4 * fds.len() as u32) as usize;
            let to = libc::CMSG_DATA(header).cast::<i32>();
            for (n, fd) in fds.iter().enumerate() {
                to.add(n).write_unaligned(*fd);
            }
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the header describes live buffers, which the kernel only reads.
    unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
}

fn owned(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: a new descriptor without another owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn socket() -> OwnedFd {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: integer arguments.
    owned(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })
}

/// The abstract name at which a slot's channels are made.
fn address(name: &str, slot: u8) -> (libc::sockaddr_un, libc::socklen_t) {
    let text = format!("\0{name}/shm/{slot}");
    // SAFETY: integers, for which zero is valid.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(text.bytes()) {
        *to = from as libc::c_char;
    }
    (address, (size_of::<libc::sa_family_t>() + text.len()) as libc::socklen_t)
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("proc is there").count()
}
