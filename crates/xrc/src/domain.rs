//! Extended reliable connections: domains and their objects.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::{Lock, Said};
use anyverbs_objects::base::Ticket;
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::Cq;
use anyverbs_objects::errno::Errno;
use anyverbs_objects::error::{CreateError, DestroyError};
use anyverbs_objects::holders::{Held, Holdable, Holder, Holders};
use anyverbs_objects::pd::Pd;
use anyverbs_objects::persona::Feature;
use anyverbs_objects::srq::{Srq, SrqInitAttr, XrcPart};
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::types::Qpn;
use anyverbs_transport::qp::{Qp, QpCell, QpParts, XrcDomain};

use super::SharedDomains;

/// Parameters for opening a domain (`struct ibv_xrcd_init_attr`).
#[derive(Debug, Default)]
pub struct XrcdInitAttr {
    /// The file that names the domain: all that open the same one, by any path, share it. None: a domain of its own.
    /// It is kept open as long as the domain exists, so that the file's identity is not reused.
    pub file: Option<File>,
    /// `O_CREAT`: make the domain if the file has none.
    pub create: bool,
    /// `O_EXCL`: refuse if the file has one.
    pub exclusive: bool,
}

/// XRC domain (`ibv_open_xrcd`): targets receive for the SRQs of their own domain only. Closed when dropped and no
/// longer in use.
///
/// A file names a domain on the host, for all processes of the user: a target receives for the SRQs of all of them.
#[derive(Debug)]
pub struct Xrcd(pub(crate) Arc<XrcdCell>);

#[derive(Debug)]
pub(crate) struct XrcdCell {
    pub(crate) shared: &'static SharedDomains,
    pub(crate) context: Arc<ContextCell>,
    /// Identifies the domain; not reused while the process lives.
    pub(crate) domain: u64,
    /// Names it in other processes.
    pub(crate) file: Option<FileId>,
    holders: Holders,
    hold: Mutex<rank::ObjectHold, Option<(Arc<Domain>, Ticket)>>,
}

impl Holdable for XrcdCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

/// The state that handles of one domain share. It is there as long as one of them is open.
#[derive(Debug)]
struct Domain {
    number: u64,
    _file: Option<(File, Said)>,
}

pub(crate) use anyverbs_proto::xrc_message::FileId;

/// The name that processes with the domain of a file share.
fn name(file: FileId) -> u128 {
    u128::from(file.0) << 64 | u128::from(file.1)
}

/// The domains of a process that have a file.
#[derive(Debug, Default)]
pub(crate) struct Domains {
    by_file: Mutex<rank::XrcDomains, HashMap<FileId, Weak<Domain>>>,
    next: AtomicU64,
}

impl Domains {
    fn new_domain(&self, file: Option<(File, Said)>) -> Arc<Domain> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Arc::new(Domain { number, _file: file })
    }

    /// The number here of a domain that other processes name by its file.
    pub(crate) fn number(&self, file: FileId) -> Option<u64> {
        let by_file = self.by_file.lock();
        Some(by_file.get(&file)?.upgrade()?.number)
    }

    fn open(
        &self,
        shared: &'static SharedDomains,
        init: XrcdInitAttr,
    ) -> Result<(Arc<Domain>, Option<FileId>), CreateError> {
        let Some(file) = init.file else { return Ok((self.new_domain(None), None)) };
        let refused = |e: std::io::Error| {
            let waited = e.kind() == std::io::ErrorKind::TimedOut;
            let otherwise = if waited { libc::ETIMEDOUT } else { libc::EIO };
            CreateError::System(e.raw_os_error().unwrap_or(otherwise))
        };
        let metadata = file.metadata().map_err(refused)?;
        let id = (metadata.dev(), metadata.ino());
        let mut by_file = self.by_file.lock();
        by_file.retain(|_, domain| domain.strong_count() > 0);
        match by_file.get(&id).and_then(Weak::upgrade) {
            Some(_) if init.exclusive => return Err(CreateError::XrcDomainExists),
            Some(domain) => return Ok((domain, Some(id))),
            None => {}
        }
        let slot = shared
            .transport
            .links
            .port
            .slot()
            .ok_or(CreateError::Unsupported("XRC domains of files"))?;
        let (store, name) = (slot.store(), name(id));
        // Before the lock: a process that is stopped while it has it holds up the others.
        shared.start_sharing().map_err(refused)?;
        // If two processes make it at the same time, one comes first.
        let locked = store.lock(Lock::Xrc).map_err(refused)?;
        let exists = !store.sharers(name).is_empty();
        if exists && init.exclusive {
            return Err(CreateError::XrcDomainExists);
        }
        if !exists && !init.create {
            return Err(CreateError::NoXrcDomain);
        }
        let shared = store.share(name).map_err(refused)?;
        drop(locked);
        let domain = self.new_domain(Some((file, shared)));
        by_file.insert(id, Arc::downgrade(&domain));
        Ok((domain, Some(id)))
    }
}

impl Xrcd {
    #[doc(hidden)]
    pub fn open(
        shared: &'static SharedDomains,
        context: &Arc<ContextCell>,
        init: XrcdInitAttr,
    ) -> Result<Self, CreateError> {
        shared.transport.core.offers(context.device, Feature::Xrc)?;
        let ticket = shared.transport.core.take(context.device, |all| &all.xrcd)?;
        let (domain, file) = shared.domains.open(shared, init)?;
        Ok(Self(Arc::new(XrcdCell {
            shared,
            context: Arc::clone(context),
            domain: domain.number,
            file,
            holders: Holders::default(),
            hold: Mutex::new(Some((domain, ticket))),
        })))
    }

    /// Makes an SRQ of type XRC. Its receives complete in `cq` (`ibv_create_srq_ex`). Requests that name it may touch
    /// the memory of `pd`.
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_srq(&self, pd: &Pd, cq: &Cq, init: &SrqInitAttr) -> Result<Srq, CreateError> {
        let cell = &self.0;
        if !pd.cell.is_of(cell.shared.transport.core, cell.context.device) {
            return Err(CreateError::Foreign("XRC domain"));
        }
        let held = Held::new(cell, Holder::Srq).ok_or(CreateError::Foreign("XRC domain"))?;
        let part = XrcPart {
            domain: cell.domain,
            held: Box::new(held),
            table: &cell.shared.transport.xrc_srqs,
        };
        Srq::create_xrc(pd, part, cq, init)
    }

    /// Makes a target: a queue pair that only receives, for any SRQ of the domain (`ibv_create_qp_ex`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_qp(&self, cookie: u64) -> Result<Qp, CreateError> {
        let cell = &self.0;
        let held = Held::new(cell, Holder::Qp).ok_or(CreateError::Foreign("XRC domain"))?;
        let xrc = Some(XrcDomain { number: cell.domain, file: cell.file });
        let parts = QpParts { xrc, cookie, ..QpParts::new(QpType::XrcRecv) };
        Qp::assemble(cell.shared.transport, &cell.context, &parts, Some(Box::new(held)))
    }

    /// Opens a target of the domain once more (`ibv_open_qp`). The queue pair stays until the last of its handles is
    /// destroyed; each of them gets its events. Without a cookie those begin with [`Qp::set_cookie`].
    ///
    /// # Errors
    /// [`CreateError::Invalid`] unless the domain has such a target; [`CreateError::System`] where another process has it and
    /// does not answer.
    pub fn open_qp(&self, qpn: Qpn, cookie: Option<u64>) -> Result<Qp, CreateError> {
        let cell = &self.0;
        cell.shared.transport.core.may_make(cell.context.device)?;
        let held = Held::new(cell, Holder::Qp).ok_or(CreateError::Foreign("XRC domain"))?;
        let known = cell.shared.transport.qps.find(qpn).filter(|qp| qp.home().is_none());
        if known.is_none()
            && qpn.slot() != cell.shared.transport.core.slot
            && let Some(file) = cell.file
        {
            let held = Box::new(held);
            let open = |enter: &dyn Fn(&QpCell), leave: &dyn Fn(&QpCell)| {
                cell.shared.open_foreign(qpn, file, enter, leave)
            };
            let opened = Qp::open_foreign(&cell.context, held, cookie, open);
            return opened.map_err(|errno| match errno {
                Errno(libc::EINVAL) => CreateError::Invalid("number of a target of the XRC domain"),
                Errno(errno) => CreateError::System(errno),
            });
        }
        known
            .filter(|qp| qp.xrc_domain() == Some(cell.domain))
            .and_then(|qp| Qp::open(qp, &cell.context, Box::new(held), cookie))
            .ok_or(CreateError::Invalid("number of a target of the XRC domain"))
    }

    /// Closes it (`ibv_close_xrcd`). The domain is gone with the last of its handles.
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a queue pair or an SRQ was made through this handle.
    pub fn close(&self) -> Result<(), DestroyError> {
        if !self.0.shared.transport.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            anyverbs_objects::say_again!(
                error,
                self.0.holders.id(),
                "XRC domain not closed: {e}; see `anyverbs explain AV8009`"
            )
        })?;
        drop(self.0.hold.lock().take());
        Ok(())
    }
}
