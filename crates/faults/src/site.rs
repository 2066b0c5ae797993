//! The call sites that a rule may name.

use std::fmt;

/// A place in the program from which calls come, directly or through other functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// A function of this name.
    Function(String),
    /// The object with this file, at this distance of a return address from its beginning if one is named.
    Object(String, Option<u64>),
}

/// A place in the program to which a call returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running<'a> {
    /// The functions that are there: more than one where the compiler has put one into another.
    pub functions: &'a [String],
    /// The names of the file of their object, without its directory.
    pub objects: &'a [String],
    /// The distance from the beginning of the object.
    pub offset: u64,
}

impl Site {
    /// Reads `FUNCTION` or `FILE+0xOFFSET`.
    pub(crate) fn find(word: &str) -> Option<Self> {
        let is_name =
            !matches!(word, ":" | "fails" | "fail" | "kills" | "kill" | "pauses" | "pause");
        let Some((object, offset)) = word.rsplit_once("+0x") else {
            // Only names of operators have such signs. An offset without 0x would be a name that no function has.
            let is_operator = word.contains("operator");
            let is_function = is_operator || !word.contains(['+', '/']);
            return (is_name && is_function).then(|| Self::Function(word.to_owned()));
        };
        let is_number = !offset.starts_with('+');
        let offset = u64::from_str_radix(offset, 16).ok().filter(|_| is_number)?;
        Self::object(object, Some(offset))
    }

    /// The object with a file, which has no directory in its name.
    pub(crate) fn object(file: &str, offset: Option<u64>) -> Option<Self> {
        let is_file = !file.is_empty() && !file.contains('/');
        is_file.then(|| Self::Object(file.to_owned(), offset))
    }

    /// Whether it is here.
    #[must_use]
    pub fn is(&self, here: &Running<'_>) -> bool {
        match self {
            Self::Function(wanted) => here.functions.iter().any(|name| is_function(name, wanted)),
            Self::Object(wanted, offset) => {
                here.objects.contains(wanted) && offset.is_none_or(|offset| offset == here.offset)
            }
        }
    }
}

/// Whether a function has this name, or has it as the last part of a longer one.
fn is_function(name: &str, wanted: &str) -> bool {
    name == wanted || last_part(name) == wanted
}

/// The name of a function without its type, its scopes and its arguments. What a compiler has made of it is left out as well:
/// `post.part.0`.
fn last_part(name: &str) -> &str {
    let (mut depth, mut start, mut end) = (0u32, 0, None);
    for (at, c) in name.char_indices() {
        match c {
            '<' | '(' | '{' | '[' => {
                if depth == 0 {
                    end = end.or(Some(at));
                }
                depth += 1;
            }
            '>' | ')' | '}' | ']' => depth = depth.saturating_sub(1),
            ':' if depth == 0 && name[at..].starts_with("::") => match &name[at + 2..] {
                // Those of Rust stand behind: `submit::<u8>`, `submit::{{closure}}`.
                rest if rest.starts_with(['<', '{']) => end = end.or(Some(at)),
                _ => (start, end) = (at + 2, None),
            },
            // The type stands before the name. Behind the arguments stand other things: `const`.
            ' ' if depth == 0 && end.is_none() => start = at + 1,
            _ => {}
        }
    }
    let part = &name[start..end.unwrap_or(name.len())];
    part.split('.').next().unwrap_or(part)
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function(name) => f.write_str(name),
            Self::Object(name, Some(offset)) => write!(f, "{name}+{offset:#x}"),
            Self::Object(name, None) => write!(f, "object {name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_a_name_is_that_of_the_function() {
        for (name, part) in [
            ("post", "post"),
            ("post.part.0", "post"),
            ("rails::Engine::submit(int)", "submit"),
            ("rails::Engine<int, std::pair<a, b> >::submit(int) const", "submit"),
            ("(anonymous namespace)::post(void (*)(int))", "post"),
            ("void rails::post<int>(int)", "post"),
            ("<rails::Engine as rails::Submit>::submit", "submit"),
            ("rails::submit::<u8>", "submit"),
            ("rails::<impl rails::Engine>::submit", "submit"),
            ("rails::submit::{{closure}}", "submit"),
            ("rails::Pointer::operator->() const", "operator->"),
            ("", ""),
        ] {
            assert_eq!(last_part(name), part, "{name}");
        }
    }

    #[test]
    fn a_site_is_found_by_its_function_or_object() {
        let functions = ["rails::Engine::submit(int)".to_owned(), "post.part.0".to_owned()];
        let objects = ["librails.so.2".to_owned()];
        let here = Running { functions: &functions, objects: &objects, offset: 0x1a2b };
        let object = |offset| Site::Object("librails.so.2".into(), offset);
        for (site, is_there) in [
            (Site::find("submit"), true),
            (Site::find("rails::Engine::submit(int)"), true),
            (Site::find("post"), true),
            (Site::find("post.part.0"), true),
            (Site::find("sub"), false),
            (Site::find("Engine"), false),
            (Site::find("librails.so.2"), false),
            (Site::find("librails.so.2+0x1a2b"), true),
            (Site::find("librails.so.2+0x1a2a"), false),
            (Site::find("librails.so+0x1a2b"), false),
            (Some(object(None)), true),
            (Some(Site::Object("librails.so".into(), None)), false),
        ] {
            assert_eq!(site.as_ref().map(|site| site.is(&here)), Some(is_there), "{site:?}");
        }
        assert_eq!(Site::find("librails.so.2+0x1A2B"), Some(object(Some(0x1a2b))));
        for word in ["+0x12", "a+0x", "a+0x+1", "a+0x12g", "fails", ":", "a+0x10000000000000000"] {
            assert_eq!(Site::find(word), None, "{word}");
        }
        // These would never be found.
        for word in ["/lib/foo+0x12", "foo+12", "foo+", "/lib/foo"] {
            assert_eq!(Site::find(word), None, "{word}");
        }
        assert_eq!(Site::object("/lib/foo", None), None);
        for word in ["operator+", "operator/", "libstdc++.so.6+0x12"] {
            assert!(Site::find(word).is_some(), "{word}");
        }
    }
}
