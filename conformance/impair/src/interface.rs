//! A network interface, as a packet socket.

use std::ffi::CString;
use std::io::{self, Read};
use std::mem;
use std::os::fd::{AsRawFd, RawFd};

use anyhow::Context;
use socket2::{Domain, Protocol, SockAddr, SockAddrStorage, Socket, Type};

/// Buffer for a time in which the bridge does not run.
const BUFFER: libc::c_int = 64 << 20;

/// An interface. Every frame on it can be received, and frames can be sent.
#[derive(Debug)]
pub struct Interface {
    socket: Socket,
    name: CString,
}

impl Interface {
    /// Opens an interface by name; needs `CAP_NET_RAW`.
    pub fn open(name: &str) -> anyhow::Result<Self> {
        let protocol = i32::from((libc::ETH_P_ALL as u16).to_be());
        let socket = Socket::new(Domain::PACKET, Type::RAW, Some(Protocol::from(protocol)))
            .context("cannot make a packet socket")?;
        let name = CString::new(name)?;
        // SAFETY: a string that ends with a zero.
        let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
        if index == 0 {
            return Err(io::Error::last_os_error())
                .with_context(|| format!("no interface {name:?}"));
        }
        let mut storage = SockAddrStorage::zeroed();
        // SAFETY: `sockaddr_ll` is a socket address and fits into the storage.
        let address = unsafe { storage.view_as::<libc::sockaddr_ll>() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol as u16;
        address.sll_ifindex = index.cast_signed();
        let len = mem::size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        // SAFETY: the address was just written.
        socket.bind(&unsafe { SockAddr::new(storage, len) }).context("cannot bind to it")?;
        socket.set_nonblocking(true)?;
        let interface = Self { socket, name };
        // Otherwise it would see its own frames.
        interface.set(libc::SOL_PACKET, libc::PACKET_IGNORE_OUTGOING, 1)?;
        interface.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER)?;
        interface.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, BUFFER)?;
        Ok(interface)
    }

    fn set(&self, level: i32, option: i32, value: libc::c_int) -> anyhow::Result<()> {
        let len = mem::size_of_val(&value) as libc::socklen_t;
        // SAFETY: an open descriptor and a live integer of that length.
        let set =
            unsafe { libc::setsockopt(self.fd(), level, option, (&raw const value).cast(), len) };
        if set != 0 {
            return Err(io::Error::last_os_error()).context("cannot set a socket option");
        }
        Ok(())
    }

    /// The descriptor for poll(2).
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// A frame that has come.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<Option<Vec<u8>>> {
        match (&self.socket).read(buffer) {
            Ok(len) => Ok(Some(buffer[..len].to_vec())),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            // The interface was taken down, or comes back.
            Err(error) if error.raw_os_error() == Some(libc::ENETDOWN) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a frame; false if the interface does not take it.
    pub fn send(&self, frame: &[u8]) -> bool {
        self.socket.send(frame).is_ok()
    }

    /// Takes the interface down or up, so that its other end sees the carrier go and come.
    pub fn set_up(&self, up: bool) -> anyhow::Result<()> {
        // SAFETY: all zero is a valid request.
        let mut request: libc::ifreq = unsafe { mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(self.name.as_bytes()) {
            *to = *from as libc::c_char;
        }
        // SAFETY: an open descriptor and a live request. The kernel reads its name and writes its flags.
        let got = unsafe { libc::ioctl(self.fd(), libc::SIOCGIFFLAGS, &raw mut request) };
        // SAFETY: the flags are a plain integer in every variant of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        let bit = libc::IFF_UP as libc::c_short;
        request.ifr_ifru.ifru_flags = if up { flags | bit } else { flags & !bit };
        // SAFETY: as above; the kernel only reads.
        if got != 0 || unsafe { libc::ioctl(self.fd(), libc::SIOCSIFFLAGS, &raw mut request) } != 0
        {
            return Err(io::Error::last_os_error()).context("cannot change the interface's state");
        }
        Ok(())
    }
}
