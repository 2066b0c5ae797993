//! AES-GCM with nonces and lengths of ESP.

use aes_gcm::aead::AeadInOut;
use aes_gcm::aes::{Aes128, Aes192, Aes256};
use aes_gcm::{AesGcm, KeyInit, Nonce};
use arrayvec::ArrayVec;
use std::fmt;

use super::EspError;

/// Bytes of the IV in a packet.
pub(super) const IV_LEN: usize = 8;
/// Bytes of a whole tag.
const TAG_LEN: usize = 16;

type Gcm<Aes> = AesGcm<Aes, aes_gcm::aead::consts::U12>;

/// The cipher, by length of its key.
enum Cipher {
    Aes128(Box<Gcm<Aes128>>),
    Aes192(Box<Gcm<Aes192>>),
    Aes256(Box<Gcm<Aes256>>),
}

/// A key, its salt and the length of the tag.
pub(super) struct Aead {
    cipher: Cipher,
    salt: [u8; 4],
    icv_len: usize,
}

impl Aead {
    pub(super) fn new(keymat: &super::AesGcm) -> Result<Self, EspError> {
        if !matches!(keymat.icv_len, 8 | 12 | TAG_LEN) {
            return Err(EspError::IcvLen);
        }
        let short = |_| EspError::KeyLen;
        let key = &keymat.key[..];
        let cipher = match key.len() {
            16 => Cipher::Aes128(Box::new(Gcm::new_from_slice(key).map_err(short)?)),
            24 => Cipher::Aes192(Box::new(Gcm::new_from_slice(key).map_err(short)?)),
            32 => Cipher::Aes256(Box::new(Gcm::new_from_slice(key).map_err(short)?)),
            _ => return Err(EspError::KeyLen),
        };
        Ok(Self { cipher, salt: keymat.salt, icv_len: keymat.icv_len })
    }

    /// Encrypts in place; the tag.
    pub(super) fn seal(
        &self,
        iv: [u8; IV_LEN],
        aad: &[u8],
        text: &mut [u8],
    ) -> ArrayVec<u8, TAG_LEN> {
        self.whole_tag(iv, aad, text).into_iter().take(self.icv_len).collect()
    }

    /// Decrypts in place. False, and `text` is of no use, if it does not fit the tag.
    pub(super) fn open(&self, iv: [u8; IV_LEN], aad: &[u8], text: &mut [u8], tag: &[u8]) -> bool {
        // The cipher is its own inverse, but it tags the bytes that it encrypts. So decrypting and encrypting again
        // gives the tag, also for the lengths that the crate does not check.
        self.whole_tag(iv, aad, text);
        let right = self.whole_tag(iv, aad, text);
        self.whole_tag(iv, aad, text);
        // It takes the same time wherever they differ.
        let differ = right.iter().zip(tag).fold(0, |differ, (a, b)| differ | (a ^ b));
        tag.len() == self.icv_len && differ == 0
    }

    fn whole_tag(&self, iv: [u8; IV_LEN], aad: &[u8], text: &mut [u8]) -> [u8; TAG_LEN] {
        let mut nonce = [0; 4 + IV_LEN];
        nonce[..4].copy_from_slice(&self.salt);
        nonce[4..].copy_from_slice(&iv);
        let nonce = Nonce::from(nonce);
        let text = text.into();
        let tag = match &self.cipher {
            Cipher::Aes128(gcm) => gcm.encrypt_inout_detached(&nonce, aad, text),
            Cipher::Aes192(gcm) => gcm.encrypt_inout_detached(&nonce, aad, text),
            Cipher::Aes256(gcm) => gcm.encrypt_inout_detached(&nonce, aad, text),
        };
        tag.expect("a packet is shorter than 64 GiB").into()
    }
}

impl fmt::Debug for Aead {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aead").field("icv_len", &self.icv_len).finish_non_exhaustive()
    }
}
