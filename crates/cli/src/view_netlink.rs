//! The view object's answers on RDMA netlink sockets: the attributes of devices and ports, as they go into a message
//! (`rdma_netlink.h` of Linux).

use std::fs;
use std::io;
use std::path::Path;

use crate::device::Device;

const DEV_INDEX: u16 = 1;
const DEV_NAME: u16 = 2;
/// The number of ports of a device.
const PORT_INDEX: u16 = 3;
const FW_VERSION: u16 = 5;
const NODE_GUID: u16 = 6;
const SYS_IMAGE_GUID: u16 = 7;
const PORT_STATE: u16 = 12;
const PORT_PHYS_STATE: u16 = 13;
const DEV_NODE_TYPE: u16 = 14;
const NDEV_INDEX: u16 = 50;
const NDEV_NAME: u16 = 51;
const DEV_PROTOCOL: u16 = 67;

const NODE_TYPE_CA: u8 = 1;

/// Attributes of a message, each padded to four bytes.
#[derive(Debug, Default)]
struct Attributes(Vec<u8>);

impl Attributes {
    fn put(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let len = (4 + value.len()) as u16;
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    fn text(&mut self, kind: u16, text: &str) -> &mut Self {
        self.put(kind, &[text.as_bytes(), b"\0"].concat())
    }
}

/// Writes the answers of a device with this number.
pub(crate) fn write(tree: &Path, device: &Device, index: u32) -> io::Result<()> {
    let dir = tree.join("netlink").join(index.to_string());
    fs::create_dir_all(&dir)?;
    let mut attributes = Attributes::default();
    attributes
        .put(DEV_INDEX, &index.to_ne_bytes())
        .text(DEV_NAME, &device.name)
        .put(PORT_INDEX, &1u32.to_ne_bytes())
        .text(FW_VERSION, &device.fw_ver)
        .put(NODE_GUID, &device.node_guid.to_ne_bytes())
        .put(SYS_IMAGE_GUID, &device.sys_image_guid.to_ne_bytes())
        .put(DEV_NODE_TYPE, &[NODE_TYPE_CA])
        .text(DEV_PROTOCOL, "roce");
    fs::write(dir.join("device"), &attributes.0)?;

    let port = &device.port;
    let mut attributes = Attributes::default();
    attributes
        .put(DEV_INDEX, &index.to_ne_bytes())
        .text(DEV_NAME, &device.name)
        .put(PORT_INDEX, &1u32.to_ne_bytes())
        .put(PORT_STATE, &[port.state])
        .put(PORT_PHYS_STATE, &[super::view_tree::phys_state(port.state)]);
    if let Some(gid) = port.gids.first() {
        attributes.put(NDEV_INDEX, &gid.ifindex.to_ne_bytes()).text(NDEV_NAME, &gid.ndev);
    }
    fs::write(dir.join("1"), &attributes.0)
}
