//! `rdma_getaddrinfo`: names and services to addresses.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    mem::{size_of, zeroed},
    ptr, slice,
};

use anyverbs::cm::{Address, IbAddress};
use anyverbs_sanitizers as sanitizers;
use libc::{addrinfo, sockaddr, socklen_t};

use crate::{
    abi::*,
    errno::{Errno, give},
    log,
    rdmacm::{address_of_length, storage},
};

/// An address, and its canonical name.
#[derive(Clone, Default)]
pub(crate) struct End {
    addr: Vec<u8>,
    canonname: Option<CString>,
}

/// The result of `rdma_getaddrinfo`: `struct rdma_addrinfo` without pointers.
#[derive(Clone, Default)]
pub(crate) struct AddrInfo {
    flags: c_int,
    family: c_int,
    qp_type: c_int,
    port_space: c_int,
    src: End,
    dst: End,
}

/// A copy of the program's query.
#[derive(Clone, Default)]
pub(crate) struct Query {
    node: Option<CString>,
    service: Option<CString>,
    /// Whether there are hints at all.
    hinted: bool,
    hints: AddrInfo,
}

/// Why nothing was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// -1 with `errno`.
    Errno(Errno),
    /// A code of getaddrinfo(3).
    Eai(c_int),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno)
    }
}

impl Failure {
    /// The nearest errno, for a call that has no codes.
    pub(crate) fn errno(self) -> Errno {
        match self {
            Self::Errno(errno) => errno,
            Self::Eai(libc::EAI_SYSTEM) => Errno::last(),
            Self::Eai(libc::EAI_MEMORY) => Errno::because(libc::ENOMEM, "there is no memory"),
            Self::Eai(libc::EAI_AGAIN) => {
                Errno::because(libc::EAGAIN, "the name server does not answer now")
            }
            Self::Eai(libc::EAI_FAMILY) => {
                Errno::because(libc::EAFNOSUPPORT, "the family of the hints is not known here")
            }
            Self::Eai(libc::EAI_NONAME | libc::EAI_NODATA | libc::EAI_FAIL) => {
                Errno::because(libc::EADDRNOTAVAIL, "the name is not known")
            }
            Self::Eai(_) => Errno::invalid("the hints or the service are wrong"),
        }
    }
}

/// # Safety
/// `text` is NULL or a string.
unsafe fn owned(text: *const c_char) -> Option<CString> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_owned())
}

/// # Safety
/// `addr` is NULL or has `len` readable bytes.
unsafe fn bytes(addr: *const sockaddr, len: socklen_t) -> Result<Vec<u8>, Errno> {
    if len == 0 {
        return Ok(Vec::new());
    }
    if addr.is_null() || len as usize > size_of::<libc::sockaddr_storage>() {
        return Err(Errno::invalid("an address of the hints is NULL or too long"));
    }
    // SAFETY: the caller's promise; copied at once.
    Ok(unsafe { slice::from_raw_parts(addr.cast::<u8>(), len as usize) }.to_vec())
}

impl Query {
    /// Copies the program's query: `EINVAL` if it gave none.
    ///
    /// # Safety
    /// `node` and `service` are NULL or strings; `hints` is NULL or readable, with addresses that are NULL or as long as it says.
    pub(crate) unsafe fn new(
        node: *const c_char,
        service: *const c_char,
        hints: *const rdma_addrinfo,
    ) -> Result<Self, Errno> {
        if node.is_null() && service.is_null() && hints.is_null() {
            return Err(Errno::invalid("node, service and hints are all NULL"));
        }
        // SAFETY: the caller's promise.
        unsafe {
            let found = match hints.as_ref() {
                None => AddrInfo::default(),
                Some(c) => AddrInfo {
                    flags: c.ai_flags,
                    family: c.ai_family,
                    qp_type: c.ai_qp_type,
                    port_space: c.ai_port_space,
                    src: End { addr: bytes(c.ai_src_addr, c.ai_src_len)?, canonname: None },
                    dst: End { addr: bytes(c.ai_dst_addr, c.ai_dst_len)?, canonname: None },
                },
            };
            Ok(Self {
                node: owned(node),
                service: owned(service),
                hinted: !hints.is_null(),
                hints: found,
            })
        }
    }

    fn flag(&self, flag: c_int) -> bool {
        self.hints.flags & flag != 0
    }

    pub(crate) fn asks_subnet_administrator(&self) -> bool {
        self.flag(RAI_SA)
    }

    /// Whether the node is a GID, and the answer an address of `AF_IB`.
    fn is_gid(&self) -> bool {
        self.flag(RAI_FAMILY) && self.hints.family == AF_IB && self.flag(RAI_NUMERICHOST)
    }

    /// Whether the hints are of this interface and agree with each other.
    fn check(&self) -> Result<(), Failure> {
        let known = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY | RAI_SA | RAI_DNS;
        if self.hints.flags & !known != 0 {
            return Err(Failure::Eai(libc::EAI_BADFLAGS));
        }
        if self.asks_subnet_administrator() {
            // RoCE has no subnet administrator.
            return Err(
                Errno::lacks("RAI_SA asks a subnet administrator, and there is none").into()
            );
        }
        if ![0, libc::AF_INET, libc::AF_INET6, AF_IB].contains(&self.hints.family) {
            return Err(Failure::Eai(libc::EAI_FAMILY));
        }
        let space = self.hints.port_space as u32;
        let datagrams = space == RDMA_PS_UDP || space == RDMA_PS_IPOIB;
        let agrees = match self.hints.qp_type as u32 {
            0 => true,
            IBV_QPT_UD => space != RDMA_PS_TCP,
            IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => !datagrams,
            _ => false,
        };
        if agrees && [0, RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB].contains(&space) {
            Ok(())
        } else {
            Err(Failure::Eai(libc::EAI_SOCKTYPE))
        }
    }

    /// Finds the addresses; may wait for a name server.
    pub(crate) fn resolve(&self) -> Result<AddrInfo, Failure> {
        self.check()?;
        let mut found = if self.node.is_some() || self.service.is_some() {
            self.look_up()?
        } else {
            AddrInfo { src: End::default(), ..self.hints.clone() }
        };
        if found.src.addr.is_empty() {
            found.src.addr.clone_from(&self.hints.src.addr);
        }
        Ok(found)
    }

    /// The hints for getaddrinfo(3).
    fn ip_hints(&self) -> addrinfo {
        let hints = &self.hints;
        // SAFETY: integers and NULL pointers.
        let mut ai: addrinfo = unsafe { zeroed() };
        if self.flag(RAI_PASSIVE) {
            ai.ai_flags |= libc::AI_PASSIVE;
        }
        if self.flag(RAI_NUMERICHOST) {
            ai.ai_flags |= libc::AI_NUMERICHOST;
        }
        if self.is_gid() {
            ai.ai_flags |= libc::AI_V4MAPPED;
            ai.ai_family = libc::AF_INET6;
        } else if hints.family != AF_IB {
            ai.ai_family = hints.family;
        }
        ai.ai_socktype = match hints.qp_type as u32 {
            0 => 0,
            IBV_QPT_UD => libc::SOCK_DGRAM,
            _ => libc::SOCK_STREAM,
        };
        ai.ai_protocol = match (hints.port_space as u32, ai.ai_socktype) {
            (RDMA_PS_TCP, _) | (RDMA_PS_IB, libc::SOCK_STREAM) => libc::IPPROTO_TCP,
            (RDMA_PS_UDP | RDMA_PS_IPOIB, _) | (RDMA_PS_IB, libc::SOCK_DGRAM) => libc::IPPROTO_UDP,
            _ => 0,
        };
        ai
    }

    fn look_up(&self) -> Result<AddrInfo, Failure> {
        let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |t| t.as_ptr());
        let hints = self.ip_hints();
        let hints = if self.hinted { &raw const hints } else { ptr::null() };
        let mut list: *mut addrinfo = ptr::null_mut();
        // SAFETY: strings that live, hints that live or NULL, and a place for the result.
        let rc = unsafe {
            libc::getaddrinfo(pointer(&self.node), pointer(&self.service), hints, &raw mut list)
        };
        if rc != 0 {
            return Err(Failure::Eai(rc));
        }
        // SAFETY: a success gives at least one entry, whose address has the length in the entry.
        let found = unsafe { list.as_ref() }.map(|first| unsafe { self.answer(first) });
        // SAFETY: from getaddrinfo, and not used again.
        unsafe { libc::freeaddrinfo(list) };
        found.unwrap_or(Err(Failure::Eai(libc::EAI_NONAME)))
    }

    /// # Safety
    /// `ai` is an entry of getaddrinfo(3).
    unsafe fn answer(&self, ai: &addrinfo) -> Result<AddrInfo, Failure> {
        let hints = &self.hints;
        let mut found = AddrInfo { family: ai.ai_family, ..AddrInfo::default() };
        found.qp_type = match (hints.qp_type, ai.ai_socktype) {
            (0, libc::SOCK_STREAM) => IBV_QPT_RC as c_int,
            (0, libc::SOCK_DGRAM) => IBV_QPT_UD as c_int,
            (asked, _) => asked,
        };
        found.port_space = match (hints.port_space, ai.ai_protocol) {
            (0, libc::IPPROTO_TCP) => RDMA_PS_TCP as c_int,
            (0, libc::IPPROTO_UDP) => RDMA_PS_UDP as c_int,
            (asked, _) => asked,
        };
        // SAFETY: the caller's promise.
        let mut end = unsafe {
            End { addr: bytes(ai.ai_addr, ai.ai_addrlen)?, canonname: owned(ai.ai_canonname) }
        };
        if self.is_gid() {
            found.family = AF_IB;
            // SAFETY: as above.
            let ip = unsafe { address_of_length(ai.ai_addr, ai.ai_addrlen) }?;
            end.addr = ib_address(ip, found.port_space as u32)?;
        }
        if ai.ai_flags & libc::AI_PASSIVE != 0 {
            found.flags = RAI_PASSIVE;
            found.src = end;
        } else {
            found.dst = end;
        }
        Ok(found)
    }
}

/// The address of `AF_IB` that stands for a GID written as an IPv6 address, with the service ID of a port.
fn ib_address(ip: Address, space: rdma_port_space) -> Result<Vec<u8>, Errno> {
    let Address::Ip(std::net::SocketAddr::V6(v6)) = ip else {
        return Err(Errno::invalid("an address of AF_IB is written as an IPv6 address"));
    };
    let port = u64::from(v6.port());
    let mask = |whole: bool, mask: u64| if whole { mask } else { 0 };
    let ib = Address::Ib(IbAddress {
        pkey: anyverbs::PKey::DEFAULT,
        flow_info: v6.flowinfo(),
        gid: anyverbs::Gid(v6.ip().octets()),
        sid: u64::from(space) << 16 | port,
        sid_mask: mask(space != 0, !0xffff) | mask(port != 0, 0xffff),
        scope_id: v6.scope_id().into(),
    });
    let c = storage(&ib);
    // SAFETY: a storage is larger than the address in it.
    unsafe { bytes((&raw const c).cast(), size_of::<sockaddr_ib>() as socklen_t) }
}

/// A block of malloc(3) with these bytes; NULL for none.
fn block(bytes: &[u8]) -> Result<*mut u8, Errno> {
    if bytes.is_empty() {
        return Ok(ptr::null_mut());
    }
    // SAFETY: malloc has no preconditions, and the block is new.
    unsafe {
        let block: *mut u8 = libc::malloc(bytes.len()).cast();
        if block.is_null() {
            return Err(Errno::because(libc::ENOMEM, "there is no memory"));
        }
        ptr::copy_nonoverlapping(bytes.as_ptr(), block, bytes.len());
        sanitizers::initialised_bytes(block.cast(), bytes.len());
        Ok(block)
    }
}

impl AddrInfo {
    /// As C has it, for `rdma_freeaddrinfo`.
    pub(crate) fn to_c(&self) -> Result<*mut rdma_addrinfo, Errno> {
        // SAFETY: calloc has no preconditions; zeros are a valid value.
        let c: *mut rdma_addrinfo = unsafe { libc::calloc(1, size_of::<rdma_addrinfo>()) }.cast();
        // SAFETY: new, and without another user.
        let Some(to) = (unsafe { c.as_mut() }) else {
            return Err(Errno::because(libc::ENOMEM, "there is no memory"));
        };
        to.ai_flags = self.flags;
        to.ai_family = self.family;
        to.ai_qp_type = self.qp_type;
        to.ai_port_space = self.port_space;
        // SAFETY: `c` is from this function, and not used again after a failure.
        self.fill(to).inspect_err(|_| unsafe { rdma_freeaddrinfo(c) })?;
        Ok(c)
    }

    fn fill(&self, to: &mut rdma_addrinfo) -> Result<(), Errno> {
        let name = |end: &End| match &end.canonname {
            Some(name) => block(name.as_bytes_with_nul()),
            None => Ok(ptr::null_mut()),
        };
        to.ai_src_addr = block(&self.src.addr)?.cast();
        to.ai_src_len = self.src.addr.len() as socklen_t;
        to.ai_dst_addr = block(&self.dst.addr)?.cast();
        to.ai_dst_len = self.dst.addr.len() as socklen_t;
        to.ai_src_canonname = name(&self.src)?.cast();
        to.ai_dst_canonname = name(&self.dst)?.cast();
        Ok(())
    }
}

/// `rdma_getaddrinfo`: 0; -1 with `errno`; or a code of getaddrinfo(3). There is no route data: RoCE needs none.
///
/// # Safety
/// `node` and `service` are NULL or strings; `hints` is NULL or readable, with addresses that are NULL or as long as it says; `res`
/// is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    res: *mut *mut rdma_addrinfo,
) -> c_int {
    log::init();
    let found = || -> Result<(), Failure> {
        if res.is_null() {
            return Err(Errno::NULL.into());
        }
        // SAFETY: the caller's promise.
        let found = unsafe { Query::new(node, service, hints) }?.resolve()?.to_c()?;
        // SAFETY: the caller's promise.
        unsafe { give(res, found) };
        Ok(())
    };
    match found() {
        Ok(()) => 0,
        Err(Failure::Errno(errno)) => {
            errno.refuse("rdma_getaddrinfo");
            -1
        }
        Err(failure @ Failure::Eai(code)) => {
            failure.errno().refuse("rdma_getaddrinfo");
            code
        }
    }
}

/// `rdma_freeaddrinfo`: frees a whole list.
///
/// # Safety
/// `res` is NULL or from `rdma_getaddrinfo` or `rdma_query_addrinfo`, and not used again.
pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(mut res: *mut rdma_addrinfo) {
    // SAFETY: the caller's promise; every block is malloc's, and free takes NULL.
    unsafe {
        while let Some(c) = res.as_ref() {
            let next = c.ai_next;
            for block in [
                c.ai_src_addr.cast(),
                c.ai_dst_addr.cast(),
                c.ai_src_canonname.cast(),
                c.ai_dst_canonname.cast(),
                c.ai_route,
                c.ai_connect,
            ] {
                libc::free(block);
            }
            libc::free(res.cast());
            res = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(node: &str, service: &str, hints: AddrInfo) -> Result<AddrInfo, Failure> {
        let text = |t: &str| (!t.is_empty()).then(|| CString::new(t).unwrap());
        Query { node: text(node), service: text(service), hinted: true, hints }.resolve()
    }

    fn hints(flags: c_int, family: c_int, qp_type: u32, port_space: u32) -> AddrInfo {
        AddrInfo {
            flags,
            family,
            qp_type: qp_type as c_int,
            port_space: port_space as c_int,
            ..AddrInfo::default()
        }
    }

    fn address_of(end: &End) -> Address {
        // SAFETY: as long as it says.
        unsafe { address_of_length(end.addr.as_ptr().cast(), end.addr.len() as socklen_t) }.unwrap()
    }

    #[test]
    fn a_name_gives_what_the_port_space_needs() {
        let tcp = query("127.0.0.1", "7471", hints(0, 0, 0, RDMA_PS_TCP)).unwrap();
        assert_eq!((tcp.flags, tcp.family), (0, libc::AF_INET));
        assert_eq!((tcp.qp_type as u32, tcp.port_space as u32), (IBV_QPT_RC, RDMA_PS_TCP));
        assert_eq!(address_of(&tcp.dst), Address::Ip("127.0.0.1:7471".parse().unwrap()));
        assert!(tcp.src.addr.is_empty());

        let udp = query("::1", "9", hints(RAI_NUMERICHOST, 0, IBV_QPT_UD, RDMA_PS_IB)).unwrap();
        assert_eq!((udp.family, udp.port_space as u32), (libc::AF_INET6, RDMA_PS_IB));
        assert_eq!(address_of(&udp.dst), Address::Ip("[::1]:9".parse().unwrap()));
    }

    #[test]
    fn the_passive_side_gets_its_own_address() {
        let any = query("", "7471", hints(RAI_PASSIVE, libc::AF_INET, 0, RDMA_PS_TCP)).unwrap();
        assert_eq!((any.flags, any.dst.addr.len()), (RAI_PASSIVE, 0));
        assert_eq!(address_of(&any.src), Address::Ip("0.0.0.0:7471".parse().unwrap()));
    }

    #[test]
    fn a_gid_becomes_an_address_of_af_ib() {
        let flags = RAI_NUMERICHOST | RAI_FAMILY;
        for (node, gid) in [("fe80::1", "fe80::1"), ("10.0.0.1", "::ffff:10.0.0.1")] {
            let found = query(node, "7", hints(flags, AF_IB, 0, RDMA_PS_TCP)).unwrap();
            assert_eq!(found.family, AF_IB);
            let Address::Ib(ib) = address_of(&found.dst) else { panic!() };
            let gid: std::net::Ipv6Addr = gid.parse().unwrap();
            assert_eq!((ib.gid.0, ib.sid, ib.sid_mask), (gid.octets(), 0x0106_0007, !0));
        }
    }

    #[test]
    fn hints_alone_are_given_back() {
        let mut alone = hints(0, libc::AF_INET, IBV_QPT_RC, RDMA_PS_TCP);
        alone.src.addr = vec![1; 16];
        alone.dst.addr = vec![2; 16];
        let found = query("", "", alone).unwrap();
        assert_eq!((&found.src.addr[..], &found.dst.addr[..]), (&[1; 16][..], &[2; 16][..]));
    }

    #[test]
    fn each_mistake_has_its_code() {
        let eai = |code| Some(Failure::Eai(code));
        let failure = |h| query("127.0.0.1", "1", h).err();
        assert_eq!(failure(hints(0x100, 0, 0, 0)), eai(libc::EAI_BADFLAGS));
        assert_eq!(failure(hints(0, libc::AF_UNIX, 0, 0)), eai(libc::EAI_FAMILY));
        assert_eq!(failure(hints(0, 0, IBV_QPT_UD, RDMA_PS_TCP)), eai(libc::EAI_SOCKTYPE));
        assert_eq!(failure(hints(0, 0, IBV_QPT_RC, RDMA_PS_UDP)), eai(libc::EAI_SOCKTYPE));
        assert_eq!(failure(hints(0, 0, 99, 0)), eai(libc::EAI_SOCKTYPE));
        assert_eq!(failure(hints(0, 0, 0, 99)), eai(libc::EAI_SOCKTYPE));
        let numeric = hints(RAI_NUMERICHOST, 0, 0, RDMA_PS_TCP);
        assert_eq!(query("no-number", "1", numeric).err(), eai(libc::EAI_NONAME));
        let sa = Some(Failure::Errno(Errno::lacks("RAI_SA")));
        assert_eq!(failure(hints(RAI_SA, 0, 0, 0)), sa);
    }

    #[test]
    fn c_gets_blocks_of_its_own() {
        let found = query("127.0.0.1", "7", hints(0, 0, 0, RDMA_PS_TCP)).unwrap();
        let c = found.to_c().unwrap();
        // SAFETY: from `to_c`, and freed once.
        unsafe {
            assert_eq!(((*c).ai_dst_len, (*c).ai_src_len), (16, 0));
            assert!(
                (*c).ai_src_addr.is_null() && (*c).ai_route.is_null() && (*c).ai_next.is_null()
            );
            assert!(address_of_length((*c).ai_dst_addr, (*c).ai_dst_len).is_ok());
            rdma_freeaddrinfo(c);
            rdma_freeaddrinfo(ptr::null_mut());
        }
    }
}
