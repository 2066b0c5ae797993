//! Operations that need no message: now and then, on some links, a device does them by itself.

use anyverbs_proto::direct::{Direct, Direction, Local};
use anyverbs_proto::env::MemoryEnv;
use anyverbs_proto::memory::Memory;
use anyverbs_proto::mr::Access;
use anyverbs_proto::payload::{Data, Payload, scatter};
use rand::Rng;
use rand::rngs::SmallRng;

use crate::device::{Around, Device};

/// The probability that a device does an operation by itself if it can.
#[derive(Debug)]
pub(crate) struct Chance {
    pub(crate) rng: SmallRng,
    pub(crate) probability: f64,
}

/// The right that a peer must have granted.
fn right_to(direction: Direction) -> Access {
    match direction {
        Direction::Write => Access::REMOTE_WRITE,
        Direction::Read => Access::REMOTE_READ,
    }
}

impl Around<'_> {
    /// Does what the peer would do on a request, if it would need no event for that.
    pub(crate) fn do_directly(&mut self, operation: &Direct<'_>) -> bool {
        let probability = self.chance.probability;
        if probability == 0.0 || !self.chance.rng.random_bool(probability) {
            return false;
        }
        let Some((device, pd)) = self.open_peer(operation) else { return false };
        self.copy(device, pd, operation).is_some()
    }

    /// The peer of an operation and its protection domain, if it would execute the request.
    pub(crate) fn open_peer(&self, operation: &Direct<'_>) -> Option<(&Device, u32)> {
        let before = self.before.iter().chain(self.behind);
        let peer =
            before.flat_map(|device| device.qps.iter().flatten().map(move |qp| (device, qp)));
        let mut connected = peer.filter(|(_, slot)| {
            let attr = slot.qp.attr();
            slot.place.qpn == operation.dest_qpn
                && attr.dest_qpn == self.place.qpn
                && attr.av.dgid == self.shared.gid
        });
        let (device, slot) = connected.next()?;
        let is_open = slot.qp.open_to_direct()?.contains(right_to(operation.direction));
        is_open.then(|| (device, slot.qp.init().pd))
    }

    fn copy(&self, device: &Device, pd: u32, operation: &Direct<'_>) -> Option<()> {
        let (peer, need) = (&device.shared, right_to(operation.direction));
        let (remote, len) = (operation.remote, operation.len);
        let hold = peer
            .mrs
            .remote(remote.rkey, (pd, operation.dest_qpn.get()), remote.va, len.into(), need)
            .ok()?;
        let mut bytes = vec![0; len as usize];
        match (operation.direction, operation.local) {
            (Direction::Write, Local::Inline(data)) => bytes.copy_from_slice(data),
            (Direction::Write, Local::Sges(sges)) => {
                let payload = Payload::gather(sges, 0, len as usize, operation.pd);
                payload.copy_to(self.mrs(), self.memory(), &mut bytes).ok()?;
            }
            (Direction::Read, Local::Sges(sges)) => {
                peer.memory.read(hold.addr(), &mut bytes).ok()?;
                let data = Data::Bytes(&bytes);
                return scatter(sges, 0, data, operation.pd, self.mrs(), self.memory()).ok();
            }
            (Direction::Read, Local::Inline(_)) => return None,
        }
        peer.memory.write(hold.addr(), &bytes).ok()
    }
}
