//! Multicast groups: which queue pairs are attached to them, and on which interfaces the process has joined them.
//!
//! A group is an IPv4 or IPv6 multicast address, written as a GID. An attached queue pair gets the group's datagrams by
//! every interface of the port, like its unicast ones. The connection manager joins on one interface, and the two count
//! separately.
//!
//! Receiving takes the table's lock alone, for a look-up.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyverbs_links::Links;
use anyverbs_locks::{Mutex, RwLock, rank};
use anyverbs_net::UdpPort;
use anyverbs_objects::error::{AttachError, DestroyError};
use anyverbs_objects::gid::GidTables;
use anyverbs_objects::limits::DeviceAttr;
use anyverbs_proto::types::{Gid, Qpn};

/// A queue pair, for the groups.
pub trait Member {
    /// Its number.
    fn qpn(&self) -> Qpn;

    /// The links that it sends by.
    fn links(&self) -> &'static Links;

    /// The number of its device.
    fn device(&self) -> usize;

    /// Whether it is of type UD.
    fn is_datagram(&self) -> bool;

    /// How many attachments it has; changed under the lock of the groups.
    fn attachments(&self) -> &AtomicU32;

    /// Whether it is destroyed.
    fn is_destroyed(&self) -> bool;

    /// It takes what is sent to a group, or no longer.
    fn set_in(&self, gid: Gid, is_in: bool);
}

/// The groups of this process.
#[derive(Debug)]
pub struct Groups<M> {
    control: Mutex<rank::Groups, Control<M>>,
    /// The queue pairs of each group, each once.
    table: RwLock<rank::GroupMembers, HashMap<Gid, Members<M>>>,
}

/// The queue pairs of a group.
type Members<M> = Arc<[Arc<M>]>;

impl<M> Default for Groups<M> {
    fn default() -> Self {
        let control = Control { groups: HashMap::new(), attachments: 0 };
        Self { control: Mutex::new(control), table: RwLock::default() }
    }
}

#[derive(Debug)]
struct Control<M> {
    groups: HashMap<Gid, Group<M>>,
    /// The attachments of all groups.
    attachments: u32,
}

/// A group that queue pairs are attached to.
#[derive(Debug)]
struct Group<M> {
    /// With the LIDs, which say nothing on RoCE, but name the attachment.
    attached: Vec<(Arc<M>, u16)>,
    /// Interfaces on which it is joined.
    interfaces: Vec<u32>,
}

impl<M: Member> Groups<M> {
    /// The queue pairs that get datagrams to `gid`.
    pub fn members(&self, gid: Gid) -> Option<Members<M>> {
        self.table.read().get(&gid).cloned()
    }

    /// Attaches a queue pair; nothing happens where it is attached already.
    pub fn attach(&self, cell: &Arc<M>, gid: Gid, lid: u16) -> Result<(), AttachError> {
        self.attach_if(cell, gid, lid, || true).map(drop)
    }

    /// As [`attach`](Self::attach), if `is_wanted` says so. It is called under the lock of the groups: who detaches the queue pair
    /// after it has changed what is wanted finds it attached. Tells whether it is attached.
    pub fn attach_if(
        &self,
        cell: &Arc<M>,
        gid: Gid,
        lid: u16,
        is_wanted: impl FnOnce() -> bool,
    ) -> Result<bool, AttachError> {
        check(&**cell, gid)?;
        let links = cell.links();
        let mut control = self.control.lock();
        // It is destroyed under the lock that is held.
        match (cell.is_destroyed(), is_wanted()) {
            (_, false) => return Ok(false),
            (true, true) => return Err(AttachError::Gone),
            (false, true) => {}
        }
        let Control { groups, attachments } = &mut *control;
        let known = groups.get(&gid);
        if known.is_some_and(|group| group.position(cell, lid).is_some()) {
            return Ok(true);
        }
        let (core, device) = (links.core, cell.device());
        let own = |group: &Group<M>| {
            group.attached.iter().filter(|(qp, _)| qp.device() == device).count() as u32
        };
        let none = Counts { groups: 0, attachments: 0, of_group: known.map_or(0, own) };
        let of_device = groups.values().map(own).fold(none, |counts, attached| Counts {
            groups: counts.groups + usize::from(attached > 0),
            attachments: counts.attachments + attached,
            ..counts
        });
        let of_process = Counts {
            groups: groups.len(),
            attachments: *attachments,
            of_group: known.map_or(0, |group| group.attached.len() as u32),
        };
        for (device, counts, max) in
            [(Some(device), of_device, core.attr_of(device)), (None, of_process, &core.attr)]
        {
            if let Some((what, limit, max)) = counts.reached(max) {
                return Err(core.full(device, what, limit, max).into());
            }
        }
        let mut joined = Group { attached: Vec::new(), interfaces: Vec::new() };
        if known.is_none() {
            joined.follow(&links.port, &links.core.gids, gid.to_ip()).map_err(AttachError::Join)?;
        }
        let group = groups.entry(gid).or_insert(joined);
        group.attached.push((Arc::clone(cell), lid));
        *attachments += 1;
        cell.attachments().fetch_add(1, Ordering::Relaxed);
        cell.set_in(gid, true);
        self.publish(gid, group);
        Ok(true)
    }

    /// Detaches a queue pair from a group that it was attached to with this LID.
    pub fn detach(&self, cell: &Arc<M>, gid: Gid, lid: u16) -> Result<(), AttachError> {
        check(&**cell, gid)?;
        let mut control = self.control.lock();
        let at = control.groups.get(&gid).and_then(|group| group.position(cell, lid));
        let at = at.ok_or(AttachError::NotAttached)?;
        self.remove(&mut control, gid, |i, _| i == at, cell);
        Ok(())
    }

    /// Detaches a queue pair that is dropped from all its groups, and ends it by `end`; no attachment comes between.
    pub(crate) fn detach_and<T>(&self, cell: &Arc<M>, end: impl FnOnce() -> T) -> T {
        if !cell.is_datagram() {
            return end();
        }
        let mut control = self.control.lock();
        let gids: Vec<Gid> = control.of(cell).map(|(gid, _)| gid).collect();
        for gid in gids {
            self.remove(&mut control, gid, |_, qp| Arc::ptr_eq(qp, cell), cell);
        }
        end()
    }

    /// Ends a queue pair by `f`, unless it is attached to groups; no attachment comes between.
    pub(crate) fn unless_attached<T>(
        &self,
        cell: &Arc<M>,
        end: impl FnOnce() -> T,
    ) -> Result<T, DestroyError> {
        if !cell.is_datagram() {
            return Ok(end());
        }
        let control = self.control.lock();
        if cell.attachments().load(Ordering::Relaxed) == 0 {
            return Ok(end());
        }
        let mut text = String::new();
        for (gid, lid) in control.of(cell) {
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "{}multicast group {gid} (LID {lid:#x})",
                if text.is_empty() { "" } else { ", " }
            );
        }
        Err(DestroyError::Busy(text))
    }

    /// The interfaces have changed: joins where there are new ones, leaves where they are gone.
    pub(crate) fn follow(&self, port: &UdpPort, gids: &GidTables) {
        let mut control = self.control.lock();
        let follow = |(gid, group): (&Gid, &mut Group<M>)| {
            group.follow(port, gids, gid.to_ip()).err().map(|error| (*gid, error))
        };
        let failed: Vec<_> = control.groups.iter_mut().filter_map(follow).collect();
        drop(control);
        for (group, error) in failed {
            tracing::warn!(%group, %error, "the group is joined nowhere");
        }
    }

    /// Removes those of the group's attachments that `which` picks, all of `cell`.
    fn remove(
        &self,
        control: &mut Control<M>,
        gid: Gid,
        which: impl Fn(usize, &Arc<M>) -> bool,
        cell: &M,
    ) {
        let Control { groups, attachments } = control;
        let Some(group) = groups.get_mut(&gid) else { return };
        let before = group.attached.len();
        let mut i = 0;
        group.attached.retain(|(qp, _)| {
            i += 1;
            !which(i - 1, qp)
        });
        let removed = (before - group.attached.len()) as u32;
        *attachments -= removed;
        cell.attachments().fetch_sub(removed, Ordering::Relaxed);
        if !group.attached.iter().any(|(qp, _)| std::ptr::eq(&**qp, cell)) {
            // Whoever delivers a packet with an older view of the table finds out here.
            cell.set_in(gid, false);
        }
        self.publish(gid, group);
        if group.attached.is_empty() {
            for interface in std::mem::take(&mut group.interfaces) {
                leave(&cell.links().port, gid.to_ip(), interface);
            }
            groups.remove(&gid);
        }
    }

    fn publish(&self, gid: Gid, group: &Group<M>) {
        let mut cells: Vec<&Arc<M>> = group.attached.iter().map(|(cell, _)| cell).collect();
        cells.sort_by_key(|cell| cell.qpn());
        cells.dedup_by_key(|cell| cell.qpn());
        let cells: Arc<[_]> = cells.into_iter().cloned().collect();
        let mut table = self.table.write();
        if cells.is_empty() {
            table.remove(&gid);
        } else {
            table.insert(gid, cells);
        }
    }
}

impl<M> Control<M> {
    /// Groups and LIDs that a queue pair is attached to.
    fn of<'a>(&'a self, cell: &'a Arc<M>) -> impl Iterator<Item = (Gid, u16)> + 'a {
        self.groups.iter().flat_map(move |(gid, group)| {
            let own = group.attached.iter().filter(|(qp, _)| Arc::ptr_eq(qp, cell));
            own.map(|(_, lid)| (*gid, *lid))
        })
    }
}

impl<M> Group<M> {
    fn position(&self, cell: &Arc<M>, lid: u16) -> Option<usize> {
        self.attached.iter().position(|(qp, l)| Arc::ptr_eq(qp, cell) && *l == lid)
    }

    /// Joins on all interfaces that have an address of the group's family, leaves on others. Fails if it is joined on
    /// none of them. Where there is no such interface nothing can come, and the group waits for one.
    fn follow(&mut self, port: &UdpPort, gids: &GidTables, group: IpAddr) -> io::Result<()> {
        let wanted = gids.interfaces(group.is_ipv4());
        self.interfaces.retain(|interface| {
            let stays = wanted.contains(interface);
            if !stays {
                leave(port, group, *interface);
            }
            stays
        });
        let mut failure = None;
        for interface in wanted {
            if self.interfaces.contains(&interface) {
                continue;
            }
            match port.join_multicast(group, interface) {
                Ok(()) => self.interfaces.push(interface),
                Err(error) => {
                    tracing::debug!(%group, interface, %error, "not joined");
                    failure = Some(error);
                }
            }
        }
        match failure {
            Some(error) if self.interfaces.is_empty() => Err(error),
            _ => Ok(()),
        }
    }
}

fn leave(port: &UdpPort, group: IpAddr, interface: u32) {
    // An interface that is gone took its memberships with it.
    if let Err(error) = port.leave_multicast(group, interface) {
        tracing::debug!(%group, interface, %error, "leaving a group");
    }
}

fn check(cell: &impl Member, gid: Gid) -> Result<(), AttachError> {
    if !cell.links().core.is_current() {
        Err(AttachError::Forked)
    } else if !cell.is_datagram() {
        Err(AttachError::NotDatagram)
    } else if !gid.is_multicast() {
        Err(AttachError::NotGroup)
    } else {
        Ok(())
    }
}

/// The attachments of a device, or of all together.
struct Counts {
    groups: usize,
    attachments: u32,
    /// Those to the group that another one is for.
    of_group: u32,
}

impl Counts {
    /// The limit that leaves no room for another attachment: what it counts, its name and its value.
    fn reached(&self, max: &DeviceAttr) -> Option<(&'static str, &'static str, u32)> {
        let most = max.max_mcast_grp;
        if self.of_group == 0 && self.groups >= most as usize {
            return Some(("multicast groups", "max_mcast_grp", most));
        }
        let most = max.max_mcast_qp_attach;
        if self.of_group >= most {
            return Some(("queue pairs in this multicast group", "max_mcast_qp_attach", most));
        }
        let (what, most) = ("attachments to multicast groups", max.max_total_mcast_qp_attach);
        (self.attachments >= most).then_some((what, "max_total_mcast_qp_attach", most))
    }
}

/// A membership of this process in a group on one interface, given up by drop. It is for the connection manager, which
/// joins before a queue pair is attached. A process that only sends needs none.
#[derive(Debug)]
pub struct Membership {
    links: &'static Links,
    group: IpAddr,
    interface: u32,
}

/// Joins a group on an interface (its index, [`GidEntry::interface`](anyverbs_objects::gid::GidEntry::interface)).
pub fn join(links: &'static Links, gid: Gid, interface: u32) -> Result<Membership, AttachError> {
    if !links.core.is_current() {
        return Err(AttachError::Forked);
    }
    if !gid.is_multicast() {
        return Err(AttachError::NotGroup);
    }
    let group = gid.to_ip();
    links.port.join_multicast(group, interface).map_err(AttachError::Join)?;
    Ok(Membership { links, group, interface })
}

impl Drop for Membership {
    fn drop(&mut self) {
        // A forked child shares the sockets: the membership is its parent's.
        if self.links.core.is_current() {
            leave(&self.links.port, self.group, self.interface);
        }
    }
}
