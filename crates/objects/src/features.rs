//! Features that a persona may lack.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, IntoDeserializer, SeqAccess, Visitor};

use crate::config::form::elements;

/// A feature that the engine has, and that a persona may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Feature {
    /// Shared receive queues.
    Srq,
    /// Reliable connections.
    Rc,
    /// Extended reliable connections.
    Xrc,
    /// Unreliable connections.
    Uc,
    /// Datagrams.
    Ud,
    /// Atomics.
    Atomics,
    /// Memory that is paged on demand.
    Odp,
    /// Memory windows.
    MemoryWindows,
    /// Device memory.
    DeviceMemory,
    /// Tag matching.
    TagMatching,
    /// Raw packets, and their work queues and flow rules.
    RawPackets,
}

impl Feature {
    /// As a refusal names it.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Srq => "shared receive queues (SRQ)",
            Self::Rc => "reliable connections (RC)",
            Self::Xrc => "extended reliable connections (XRC)",
            Self::Uc => "unreliable connections (UC)",
            Self::Ud => "datagrams (UD)",
            Self::Atomics => "atomics",
            Self::Odp => "paging on demand (ODP)",
            Self::MemoryWindows => "memory windows",
            Self::DeviceMemory => "device memory",
            Self::TagMatching => "tag matching",
            Self::RawPackets => "raw packets",
        }
    }
}

/// A set of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(u16);

impl Features {
    /// None of them.
    pub const NONE: Self = Self(0);

    /// Whether it has a feature.
    #[must_use]
    pub fn has(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u8 != 0
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        Self(features.into_iter().fold(0, |set, feature| set | 1 << feature as u8))
    }
}

impl<'de> Deserialize<'de> for Features {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Lacks;
        impl<'de> Visitor<'de> for Lacks {
            type Value = Features;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of features, as [\"rc\"]")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Features, A::Error> {
                Ok(elements(list)?.into_iter().map(|Named(feature)| feature).collect())
            }
        }
        from.deserialize_any(Lacks)
    }
}

/// A feature by its name.
struct Named(Feature);

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct One;
        impl Visitor<'_> for One {
            type Value = Named;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a feature")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Named, E> {
                Feature::deserialize(name.into_deserializer()).map(Named)
            }
        }
        from.deserialize_any(One)
    }
}
