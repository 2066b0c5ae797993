//! Flow actions (`ibv_flow_action_esp(3)`).

use std::{ffi::c_int, mem::size_of, sync::Arc};

use anyverbs::raw;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, pointer, value},
    object::{self, Object},
    verbs::{Context, context},
};

pub(crate) type FlowAction = Object<ibv_flow_action>;

/// The device's part of a flow action.
pub(crate) struct FlowActionInner {
    pub(crate) device: raw::FlowActionEsp,
    pub(crate) context: Arc<Context>,
}

/// Most headers of a tunnel: IP and UDP.
const MAX_ENCAPSULATION: usize = 2;
/// `flags` of IPv4 that say not to fragment.
const DONT_FRAGMENT: u8 = 2;

/// The parameters that the program gave.
struct Parameters {
    esp: Option<ib_uverbs_flow_action_esp>,
    keymat: Option<raw::AesGcm>,
    replay_window: Option<u32>,
    tunnel: Option<raw::Encapsulation>,
    esn: Option<u32>,
}

/// Slot of `ibv_create_flow_action_esp`: NULL with `errno` on failure. `EOPNOTSUPP` for key material that is not AES-GCM, for
/// inline encryption in transport mode and for padding in transport mode.
///
/// # Safety
/// `attr` is NULL or readable, and so are the structs it points to.
pub(crate) unsafe extern "C" fn create_flow_action_esp(
    context_: *mut ibv_context,
    attr: *mut ibv_flow_action_esp_attr,
) -> *mut ibv_flow_action {
    let _uncancelled = Uncancelled::new();
    let _call = check::Call::new("ibv_create_flow_action_esp");
    pointer(
        "ibv_create_flow_action_esp",
        context(context_).and_then(|context| {
            // SAFETY: the caller's promise.
            let given = unsafe { Parameters::read(attr)? };
            let esp = given.esp.ok_or(Errno::NULL)?;
            let tunnel = esp.flags & IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT == 0;
            let full = esp.flags & IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD != 0;
            let encrypt = esp.flags & IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT != 0;
            let mut attr = raw::EspAttr {
                direction: if encrypt { raw::Direction::Encrypt } else { raw::Direction::Decrypt },
                offload: if full {
                    raw::Offload::Full(raw::FullOffload::default())
                } else {
                    raw::Offload::InlineCrypto { new_window: false, tunnel }
                },
                keymat: given.keymat.clone().ok_or(Errno::NULL)?,
                esn: None,
            };
            given.apply(&mut attr)?;
            // In tunnel mode the outer headers are needed, else there are none.
            if attr.offload.is_tunnel() != tunnel {
                return Err(Errno::invalid("esp_encap is needed in tunnel mode, and in no other"));
            }
            let device = context.inner.device.create_flow_action_esp(attr)?;
            let public = ibv_flow_action { context: context.pointer() };
            Ok(object::publish(public, 0, FlowActionInner { device, context }))
        }),
    )
}

/// Slot of `ibv_modify_flow_action_esp`: 0, or the errno value. A part that is NULL stays; direction, offload and mode
/// cannot change (`EINVAL`).
///
/// # Safety
/// As for [`create_flow_action_esp`].
pub(crate) unsafe extern "C" fn modify_flow_action_esp(
    action: *mut ibv_flow_action,
    attr: *mut ibv_flow_action_esp_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_modify_flow_action_esp",
        object::find(action).and_then(|action: Arc<FlowAction>| {
            action.inner.context.answers()?;
            // SAFETY: the caller's promise.
            let given = unsafe { Parameters::read(attr)? };
            let mut attr = action.inner.device.attr();
            if let Some(esp) = &given.esp {
                let same = |flag, is| (esp.flags & flag != 0) == is;
                let fits =
                    same(IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT, !attr.offload.is_tunnel())
                        && same(
                            IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD,
                            matches!(attr.offload, raw::Offload::Full(_)),
                        )
                        && same(
                            IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT,
                            attr.direction == raw::Direction::Encrypt,
                        );
                if !fits {
                    return Err(Errno::invalid(
                        "a flag differs from what the flow action has, and cannot be modified",
                    ));
                }
            }
            given.apply(&mut attr)?;
            let restart = raw::Restart {
                sequence: given.esp.is_some() || given.replay_window.is_some(),
                key: given.keymat.is_some(),
                esn: given.esn.is_some(),
            };
            Ok(action.inner.device.modify(attr, restart)?)
        }),
    )
}

/// Slot of `ibv_destroy_flow_action`: 0, or the errno value; `EBUSY` while a flow rule uses it.
pub(crate) unsafe extern "C" fn destroy_flow_action(action: *mut ibv_flow_action) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_flow_action",
        object::find(action).and_then(|action: Arc<FlowAction>| {
            action.inner.device.destroy()?;
            object::retire(&action)
        }),
    )
}

/// Reads the struct at `pointer`, if it has that length.
///
/// # Safety
/// `pointer` is NULL, or has `len` bytes.
unsafe fn read<T: Copy>(pointer: *const T, len: usize) -> Result<Option<T>, Errno> {
    match (pointer.is_null(), len == size_of::<T>()) {
        (true, _) => Ok(None),
        (false, false) => Err(Errno::invalid("a length is not that of its struct")),
        // SAFETY: the caller's promise.
        (false, true) => Ok(Some(unsafe { pointer.read_unaligned() })),
    }
}

impl Parameters {
    /// # Safety
    /// `attr` is NULL or readable, and so are the structs it points to.
    unsafe fn read(attr: *const ibv_flow_action_esp_attr) -> Result<Self, Errno> {
        if attr.is_null() {
            return Err(Errno::NULL);
        }
        // SAFETY: the caller's promise, here and below.
        let attr = unsafe { attr.read() };
        if attr.comp_mask & !IBV_FLOW_ACTION_ESP_MASK_ESN != 0 {
            return Err(Errno::COMP_MASK);
        }
        // SAFETY: as above.
        let esp = unsafe { attr.esp_attr.as_ref() }.copied();
        let known = IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD
            | IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT
            | IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT
            | IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW;
        if esp.is_some_and(|esp: ib_uverbs_flow_action_esp| esp.flags & !known != 0) {
            return Err(Errno::invalid("flags has a bit that is no flag"));
        }
        let keymat = attr.keymat_ptr.cast::<ib_uverbs_flow_action_esp_keymat_aes_gcm>();
        let keymat = match attr.keymat_proto {
            // SAFETY: as above.
            IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM => unsafe {
                read(keymat.cast_const(), attr.keymat_len.into())?
            },
            _ => {
                return Err(Errno::lacks(
                    "keymat_proto is not IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM",
                ));
            }
        };
        let replay = attr.replay_ptr.cast::<ib_uverbs_flow_action_esp_replay_bmp>();
        let replay_window = match attr.replay_proto {
            IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE => None,
            IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP => {
                // SAFETY: as above.
                let bitmap = unsafe { read(replay.cast_const(), attr.replay_len.into())? };
                Some(bitmap.ok_or(Errno::NULL)?.size)
            }
            _ => return Err(Errno::lacks("replay_proto is none that is known here")),
        };
        Ok(Self {
            esp,
            keymat: keymat.map(|keymat| aes_gcm(&keymat)).transpose()?,
            replay_window,
            // SAFETY: as above.
            tunnel: unsafe { encapsulation(attr.esp_encap)? },
            esn: (attr.comp_mask & IBV_FLOW_ACTION_ESP_MASK_ESN != 0).then_some(attr.esn),
        })
    }

    /// Replaces the given parts of `attr`. `EINVAL` for parts that belong to full offload alone.
    fn apply(&self, attr: &mut raw::EspAttr) -> Result<(), Errno> {
        if let Some(keymat) = &self.keymat {
            attr.keymat = keymat.clone();
        }
        if self.esn.is_some() {
            attr.esn = self.esn;
        }
        match &mut attr.offload {
            raw::Offload::InlineCrypto { new_window, .. } => {
                if self.replay_window.is_some() || self.tunnel.is_some() {
                    return Err(Errno::invalid(
                        "a replay window or a tunnel goes with full offload alone",
                    ));
                }
                if let Some(esp) = &self.esp {
                    *new_window = esp.flags & IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW != 0;
                }
            }
            raw::Offload::Full(full) => {
                if let Some(esp) = &self.esp {
                    if esp.flags & IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW != 0 {
                        return Err(Errno::invalid(
                            "IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW does not go with full offload",
                        ));
                    }
                    full.spi = esp.spi;
                    full.seq = esp.seq;
                    full.tfc_pad = esp.tfc_pad;
                    full.hard_limit = esp.hard_limit_pkts;
                }
                if let Some(size) = self.replay_window {
                    full.replay_window = size;
                }
                if let Some(tunnel) = &self.tunnel {
                    full.tunnel = Some(tunnel.clone());
                }
            }
        }
        Ok(())
    }
}

/// Key and salt lie in memory as they are used: in network byte order.
fn aes_gcm(keymat: &ib_uverbs_flow_action_esp_keymat_aes_gcm) -> Result<raw::AesGcm, Errno> {
    if keymat.iv_algo != IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ {
        return Err(Errno::lacks("iv_algo is not IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ"));
    }
    let key = keymat.aes_key.iter().flat_map(|word| word.to_ne_bytes());
    Ok(raw::AesGcm {
        key: match keymat.key_len {
            16 | 24 | 32 => key.take(keymat.key_len as usize).collect(),
            _ => return Err(Errno::invalid("key_len is neither 16, 24 nor 32")),
        },
        salt: keymat.salt.to_ne_bytes(),
        iv: keymat.iv,
        icv_len: keymat.icv_len as usize,
    })
}

/// The headers of a tunnel: IP, and UDP behind it.
///
/// # Safety
/// `at` is NULL or readable, and so is the header it points to.
unsafe fn encapsulation(
    at: *const ib_uverbs_flow_action_esp_encap,
) -> Result<Option<raw::Encapsulation>, Errno> {
    let mut at = at;
    let (mut ip, mut udp) = (None, None);
    for _ in 0..MAX_ENCAPSULATION {
        if at.is_null() {
            break;
        }
        // SAFETY: the caller's promise.
        let header = unsafe { at.read_unaligned() };
        // SAFETY: as above.
        unsafe {
            if ip.is_none() {
                ip = Some(outer_ip(&header)?);
            } else {
                udp = Some(outer_udp(&header)?);
            }
        }
        at = header.next_ptr as *const ib_uverbs_flow_action_esp_encap;
    }
    if !at.is_null() {
        return Err(Errno::invalid("the list of outer headers is too long"));
    }
    Ok(ip.map(|ip| raw::Encapsulation { ip, udp }))
}

/// # Safety
/// `header` points to the number of bytes it gives.
unsafe fn filter<T: Copy>(header: &ib_uverbs_flow_action_esp_encap) -> Result<T, Errno> {
    // SAFETY: the caller's promise.
    unsafe { read(header.val_ptr as *const T, header.len.into()) }?
        .ok_or(Errno::invalid("an outer header has no value"))
}

/// # Safety
/// As for [`filter`].
unsafe fn outer_ip(header: &ib_uverbs_flow_action_esp_encap) -> Result<raw::OuterIp, Errno> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(match header.r#type.into() {
            IBV_FLOW_SPEC_IPV4 => {
                let ip: ibv_flow_ipv4_filter = filter(header)?;
                let [src, dst] = [ip.src_ip, ip.dst_ip].map(u32::from_be);
                raw::OuterIp::V4 { src, dst, tos: 0, ttl: 0, df: false }
            }
            IBV_FLOW_SPEC_IPV4_EXT => {
                let ip: ibv_flow_ipv4_ext_filter = filter(header)?;
                let [src, dst] = [ip.src_ip, ip.dst_ip].map(u32::from_be);
                let df = ip.flags & DONT_FRAGMENT != 0;
                raw::OuterIp::V4 { src, dst, tos: ip.tos, ttl: ip.ttl, df }
            }
            IBV_FLOW_SPEC_IPV6 => {
                let ip: ibv_flow_ipv6_filter = filter(header)?;
                raw::OuterIp::V6 {
                    src: u128::from_be_bytes(ip.src_ip),
                    dst: u128::from_be_bytes(ip.dst_ip),
                    flow_label: u32::from_be(ip.flow_label),
                    traffic_class: ip.traffic_class,
                    hop_limit: ip.hop_limit,
                }
            }
            _ => return Err(Errno::lacks("the encapsulation is neither IPv4 nor IPv6")),
        })
    }
}

/// # Safety
/// As for [`filter`].
unsafe fn outer_udp(header: &ib_uverbs_flow_action_esp_encap) -> Result<(u16, u16), Errno> {
    if u32::from(header.r#type) != IBV_FLOW_SPEC_UDP {
        return Err(Errno::lacks("the encapsulation is not UDP"));
    }
    // SAFETY: the caller's promise.
    let udp: ibv_flow_tcp_udp_filter = unsafe { filter(header)? };
    Ok((u16::from_be(udp.src_port), u16::from_be(udp.dst_port)))
}
