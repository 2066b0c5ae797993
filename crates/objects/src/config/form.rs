//! The forms of lists and tables in files.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};

/// The things of a list that may each have a table.
pub(super) trait Kind {
    /// Their name, for people.
    const MANY: &'static str;

    /// Whether a table has a key.
    fn says_something(&self) -> bool;
}

/// A number of things, or a list of them.
#[derive(Debug)]
pub(super) enum Several<T> {
    /// So many.
    Number(i128),
    /// Each of these.
    List(Vec<T>),
}

/// A thing of a list.
#[derive(Debug)]
pub(super) enum Item<T> {
    /// An interface or an address. Of a device perhaps behind a name and `=`.
    Text(String),
    /// A table of a file.
    Table(T),
}

/// A table. Serde would take a list for it as well, with the values of the keys in their order.
#[derive(Debug)]
pub(crate) struct Tabled<T>(pub(crate) T);

/// The P_Keys of a port, before they are checked.
#[derive(Debug)]
pub(super) struct PkeyList(pub(super) Vec<i128>);

impl<T: Kind> Several<Item<T>> {
    /// The number of tables that say something.
    pub(super) fn tables(&self) -> usize {
        let says = |item: &&Item<T>| matches!(item, Item::Table(table) if table.says_something());
        match self {
            Self::Number(_) => 0,
            Self::List(items) => items.iter().filter(says).count(),
        }
    }
}

impl<'de, T: Kind + Deserialize<'de>> Deserialize<'de> for Several<Item<T>> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct All<T>(PhantomData<T>);
        impl<'de, T: Kind + Deserialize<'de>> Visitor<'de> for All<T> {
            type Value = Several<Item<T>>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a number of {}, or a list of them", T::MANY)
            }

            fn visit_i64<E>(self, number: i64) -> Result<Self::Value, E> {
                Ok(Several::Number(number.into()))
            }

            fn visit_u64<E>(self, number: u64) -> Result<Self::Value, E> {
                Ok(Several::Number(number.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                elements(list).map(Several::List)
            }
        }
        from.deserialize_any(All(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Item<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct One<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for One<T> {
            type Value = Item<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an interface, an address or a table")
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Item::Text(text.trim().to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Item::Table)
            }
        }
        from.deserialize_any(One(PhantomData))
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Tabled<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Keys<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Keys<T> {
            type Value = Tabled<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Tabled)
            }
        }
        from.deserialize_any(Keys(PhantomData))
    }
}

impl<'de> Deserialize<'de> for PkeyList {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = PkeyList;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of P_Keys")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<PkeyList, A::Error> {
                let keys = elements(list)?.into_iter().map(|Key(key)| key);
                Ok(PkeyList(keys.collect()))
            }
        }
        from.deserialize_any(Keys)
    }
}

/// A P_Key, before it is checked.
struct Key(i128);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct One;
        impl Visitor<'_> for One {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a P_Key as a number")
            }

            fn visit_i64<E>(self, key: i64) -> Result<Key, E> {
                Ok(Key(key.into()))
            }

            fn visit_u64<E>(self, key: u64) -> Result<Key, E> {
                Ok(Key(key.into()))
            }
        }
        from.deserialize_any(One)
    }
}

/// Every element of a list.
pub(crate) fn elements<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(
    mut list: A,
) -> Result<Vec<T>, A::Error> {
    let mut elements = Vec::new();
    while let Some(element) = list.next_element()? {
        elements.push(element);
    }
    Ok(elements)
}
