//! A source file with all of its mutants: each mutated expression becomes a choice on a number.
//!
//! `a < b` becomes `(if is(7) { ((a) <= (b)) } else { (a < b) })`. The mutated side has the text of the original, so that the
//! file grows with the number of its mutants and not with their products: one mutant is chosen at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use anyhow::Context;
use proc_macro2::Span;
use serde::Deserialize;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Arm, Block, Expr, Pat, Signature, Type, UnOp};

/// The number of a mutant.
pub(super) type Id = u32;

/// The kind of a change, as cargo-mutants names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(super) enum Genre {
    FnValue,
    BinaryOperator,
    UnaryOperator,
    MatchArm,
    MatchArmGuard,
    StructField,
}

/// A place in a file, as cargo-mutants counts it: from 1, in characters.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct LineColumn {
    pub(super) line: usize,
    pub(super) column: usize,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Place {
    pub(super) start: LineColumn,
    pub(super) end: LineColumn,
}

/// A mutant, as `cargo mutants --list --json` has it.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Mutant {
    pub(super) name: String,
    pub(super) file: String,
    pub(super) genre: Genre,
    pub(super) replacement: String,
    pub(super) span: Place,
}

/// A mutated file.
#[derive(Debug, Default)]
pub(super) struct Mutated {
    pub(super) text: String,
    /// Places in the text. Inner ones stand before outer ones.
    pieces: Vec<Piece>,
    /// Mutants that have a choice in the text.
    pub(super) chosen: Vec<Id>,
    /// Mutants of constants, whose value cannot depend on a number.
    pub(super) constant: Vec<Id>,
}

#[derive(Debug)]
struct Piece {
    place: Range<usize>,
    ids: Vec<Id>,
}

impl Mutated {
    /// The mutants that an error at this place is about.
    pub(super) fn at(&self, place: &Range<usize>) -> &[Id] {
        let covers =
            |piece: &&Piece| piece.place.start <= place.start && place.end <= piece.place.end;
        let found = self.pieces.iter().filter(covers).min_by_key(|piece| piece.place.len());
        found.map_or(&[], |piece| &piece.ids)
    }

    /// The mutants that begin in the line of this place.
    pub(super) fn on_line(&self, place: &Range<usize>) -> Vec<Id> {
        let begin = self.text[..place.start].rfind('\n').map_or(0, |at| at + 1);
        let end = self.text[place.end..].find('\n').map_or(self.text.len(), |at| place.end + at);
        let inside = |piece: &&Piece| (begin..end).contains(&piece.place.start);
        self.pieces.iter().filter(inside).flat_map(|piece| piece.ids.clone()).collect()
    }
}

/// Makes the choices of a file. Mutants in `dropped` do not compile. Functions in `constants` stay constant; the others become
/// plain ones.
pub(super) fn mutate(
    source: &str,
    mutants: &[(Id, &Mutant)],
    dropped: &BTreeSet<Id>,
    constants: &BTreeSet<String>,
) -> anyhow::Result<Mutated> {
    let file = syn::parse_file(source)?;
    let lines = Lines::new(source);
    let mut by_place: BTreeMap<(Genre, usize), Vec<(Id, &Mutant)>> = BTreeMap::new();
    for (id, mutant) in mutants {
        let place = (mutant.genre, lines.offset(mutant.span.start));
        by_place.entry(place).or_default().push((*id, mutant));
    }
    let mut finder = Finder {
        source,
        by_place,
        lines,
        dropped,
        constants,
        of_type: None,
        in_constant: false,
        has_rest: false,
        edits: Vec::new(),
        constant: Vec::new(),
    };
    finder.visit_file(&file);
    let Finder { mut edits, constant, .. } = finder;
    // Stable: of two at one place, the outer one was found first.
    edits.sort_by_key(|edit| (edit.range.start, edit.is_wrap(), usize::MAX - edit.range.end));
    let mut writer = Writer { source, edits: &edits, next: 0, mutated: Mutated::default() };
    writer.write(0..source.len());
    let mut mutated = writer.mutated;
    mutated.constant = constant;
    syn::parse_file(&mutated.text).context("the choices do not parse")?;
    Ok(mutated)
}

struct Lines(Vec<(usize, String)>);

impl Lines {
    fn new(source: &str) -> Self {
        let mut at = 0;
        let lines = source.split_inclusive('\n').map(|line| {
            at += line.len();
            (at - line.len(), line.to_owned())
        });
        Self(lines.collect())
    }

    fn offset(&self, place: LineColumn) -> usize {
        let (begin, line) = &self.0[place.line - 1];
        let column = line.char_indices().nth(place.column - 1);
        begin + column.map_or(line.len(), |(at, _)| at)
    }
}

/// A change of the text.
struct Edit {
    range: Range<usize>,
    kind: Kind,
}

enum Kind {
    /// Other expressions in the place of this one.
    Wrap(Vec<(Id, String)>),
    /// Texts at the beginning of the range.
    Insert(Vec<(Id, String)>),
    Delete,
}

impl Edit {
    fn is_wrap(&self) -> bool {
        matches!(self.kind, Kind::Wrap(_))
    }
}

struct Finder<'a> {
    source: &'a str,
    by_place: BTreeMap<(Genre, usize), Vec<(Id, &'a Mutant)>>,
    lines: Lines,
    dropped: &'a BTreeSet<Id>,
    constants: &'a BTreeSet<String>,
    /// The type of the `impl` around.
    of_type: Option<String>,
    /// In what the compiler evaluates.
    in_constant: bool,
    /// The `match` around has an arm for all that the others do not take.
    has_rest: bool,
    edits: Vec<Edit>,
    constant: Vec<Id>,
}

fn range(span: Span) -> Range<usize> {
    span.byte_range()
}

impl<'a> Finder<'a> {
    /// Takes the mutants of this kind that begin here.
    fn take(&mut self, genre: Genre, at: usize) -> Vec<(Id, &'a Mutant)> {
        let mut found = self.by_place.remove(&(genre, at)).unwrap_or_default();
        if self.in_constant {
            self.constant.extend(found.drain(..).map(|(id, _)| id));
        }
        found.retain(|(id, _)| !self.dropped.contains(id));
        found
    }

    fn text(&self, node: &impl Spanned) -> &'a str {
        &self.source[range(node.span())]
    }

    fn edit(&mut self, range: Range<usize>, kind: Kind) {
        if !matches!(&kind, Kind::Wrap(all) | Kind::Insert(all) if all.is_empty()) {
            self.edits.push(Edit { range, kind });
        }
    }

    fn constantly(&mut self, visit: impl FnOnce(&mut Self)) {
        let before = std::mem::replace(&mut self.in_constant, true);
        visit(self);
        self.in_constant = before;
    }

    /// A function: its value, and its body.
    fn function(&mut self, sig: &Signature, block: &Block, visit: impl FnOnce(&mut Self)) {
        let before = self.in_constant;
        self.in_constant = false;
        if let Some(constness) = &sig.constness {
            let name = sig.ident.to_string();
            let full = self.of_type.as_ref().map(|of_type| format!("{of_type}::{name}"));
            if self.constants.contains(&name) || full.is_some_and(|n| self.constants.contains(&n)) {
                self.in_constant = true;
            } else {
                self.edit(range(constness.span()), Kind::Delete);
            }
        }
        if let Some(first) = block.stmts.first() {
            let at = range(first.span()).start;
            let mut values = self.take(Genre::FnValue, at);
            // Two values of one such type are two types.
            if self.text(&sig.output).contains("impl ") {
                values.clear();
            }
            let values = values.into_iter().map(|(id, mutant)| {
                (id, format!("if {} {{ return {}; }} ", is(id), mutant.replacement))
            });
            let values = values.collect();
            self.edit(at..at, Kind::Insert(values));
        }
        visit(self);
        self.in_constant = before;
    }
}

/// The condition that chooses a mutant.
fn is(id: Id) -> String {
    format!("crate::__mutants::is({id})")
}

/// Whether an expression has a `let` that is no statement.
fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        _ => false,
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_item_const(&mut self, node: &'ast syn::ItemConst) {
        self.constantly(|this| visit::visit_item_const(this, node));
    }

    fn visit_item_static(&mut self, node: &'ast syn::ItemStatic) {
        self.constantly(|this| visit::visit_item_static(this, node));
    }

    fn visit_impl_item_const(&mut self, node: &'ast syn::ImplItemConst) {
        self.constantly(|this| visit::visit_impl_item_const(this, node));
    }

    fn visit_trait_item_const(&mut self, node: &'ast syn::TraitItemConst) {
        self.constantly(|this| visit::visit_trait_item_const(this, node));
    }

    fn visit_variant(&mut self, node: &'ast syn::Variant) {
        self.constantly(|this| visit::visit_variant(this, node));
    }

    fn visit_type_array(&mut self, node: &'ast syn::TypeArray) {
        self.constantly(|this| visit::visit_type_array(this, node));
    }

    fn visit_generic_argument(&mut self, node: &'ast syn::GenericArgument) {
        self.constantly(|this| visit::visit_generic_argument(this, node));
    }

    fn visit_expr_const(&mut self, node: &'ast syn::ExprConst) {
        self.constantly(|this| visit::visit_expr_const(this, node));
    }

    fn visit_expr_repeat(&mut self, node: &'ast syn::ExprRepeat) {
        self.visit_expr(&node.expr);
        self.constantly(|this| this.visit_expr(&node.len));
    }

    fn visit_item_impl(&mut self, node: &'ast syn::ItemImpl) {
        let of_type = match &*node.self_ty {
            Type::Path(path) => path.path.segments.last().map(|last| last.ident.to_string()),
            _ => None,
        };
        let before = std::mem::replace(&mut self.of_type, of_type);
        visit::visit_item_impl(self, node);
        self.of_type = before;
    }

    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        self.function(&node.sig, &node.block, |this| visit::visit_item_fn(this, node));
    }

    fn visit_impl_item_fn(&mut self, node: &'ast syn::ImplItemFn) {
        self.function(&node.sig, &node.block, |this| visit::visit_impl_item_fn(this, node));
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        match &node.default {
            Some(block) => {
                self.function(&node.sig, block, |this| visit::visit_trait_item_fn(this, node));
            }
            None => visit::visit_trait_item_fn(self, node),
        }
    }

    fn visit_expr_binary(&mut self, node: &'ast syn::ExprBinary) {
        let found = self.take(Genre::BinaryOperator, range(node.op.span()).start);
        // A chain with `let` has no other operator.
        if !has_let(&node.left) && !has_let(&node.right) {
            let (left, right) = (self.text(&*node.left), self.text(&*node.right));
            let others = found.into_iter();
            let others = others
                .map(|(id, mutant)| (id, format!("({left}) {} ({right})", mutant.replacement)));
            let others = others.collect();
            self.edit(range(node.span()), Kind::Wrap(others));
        }
        visit::visit_expr_binary(self, node);
    }

    fn visit_expr_unary(&mut self, node: &'ast syn::ExprUnary) {
        if matches!(node.op, UnOp::Not(_) | UnOp::Neg(_)) {
            let found = self.take(Genre::UnaryOperator, range(node.op.span()).start);
            let without = self.text(&*node.expr).to_owned();
            let others = found.into_iter().map(|(id, _)| (id, without.clone())).collect();
            self.edit(range(node.span()), Kind::Wrap(others));
        }
        visit::visit_expr_unary(self, node);
    }

    fn visit_arm(&mut self, node: &'ast Arm) {
        if let Pat::Guard(guarded) = &node.pat {
            let guard = range(guarded.guard.span());
            let found = self.take(Genre::MatchArmGuard, guard.start);
            if !has_let(&guarded.guard) {
                let others = found.into_iter();
                let others = others.map(|(id, mutant)| (id, mutant.replacement.clone())).collect();
                self.edit(guard, Kind::Wrap(others));
            }
        } else {
            let found = self.take(Genre::MatchArm, range(node.span()).start);
            let end = range(node.pat.span()).end;
            // Without the rest, no match compiles that leaves one out.
            let found = found.into_iter().filter(|_| self.has_rest);
            let guards = found.map(|(id, _)| (id, format!(" if !{}", is(id)))).collect();
            self.edit(end..end, Kind::Insert(guards));
        }
        visit::visit_arm(self, node);
    }

    fn visit_expr_match(&mut self, node: &'ast syn::ExprMatch) {
        self.visit_expr(&node.expr);
        for arm in &node.arms {
            // An arm may have a match inside.
            self.has_rest = node.arms.iter().any(|arm| matches!(arm.pat, Pat::Wild(_)));
            self.visit_arm(arm);
        }
    }

    fn visit_expr_struct(&mut self, node: &'ast syn::ExprStruct) {
        let whole = range(node.span());
        let mut others = Vec::new();
        for field in &node.fields {
            for (id, mutant) in self.take(Genre::StructField, range(field.span()).start) {
                let end = self.lines.offset(mutant.span.end);
                let begin = range(field.span()).start;
                let (before, behind) =
                    (&self.source[whole.start..begin], &self.source[end..whole.end]);
                others.push((id, format!("{before}{behind}")));
            }
        }
        self.edit(whole, Kind::Wrap(others));
        visit::visit_expr_struct(self, node);
    }
}

struct Writer<'a> {
    source: &'a str,
    edits: &'a [Edit],
    next: usize,
    mutated: Mutated,
}

impl Writer<'_> {
    fn write(&mut self, range: Range<usize>) {
        let mut at = range.start;
        while let Some(edit) = self.edits.get(self.next) {
            if edit.range.start >= range.end {
                break;
            }
            self.next += 1;
            self.mutated.text.push_str(&self.source[at..edit.range.start]);
            at = edit.range.end;
            match &edit.kind {
                Kind::Delete => {}
                Kind::Insert(all) => all.iter().for_each(|(id, text)| self.piece(*id, text)),
                Kind::Wrap(all) => self.wrap(edit.range.clone(), all),
            }
        }
        self.mutated.text.push_str(&self.source[at..range.end]);
    }

    /// Text that is about one mutant alone.
    fn piece(&mut self, id: Id, text: &str) {
        let begin = self.mutated.text.len();
        self.mutated.text.push_str(text);
        self.mutated.chosen.push(id);
        let place = begin..self.mutated.text.len();
        self.mutated.pieces.push(Piece { place, ids: vec![id] });
    }

    fn wrap(&mut self, original: Range<usize>, others: &[(Id, String)]) {
        let begin = self.mutated.text.len();
        self.mutated.text.push('(');
        for (id, text) in others {
            self.piece(*id, &format!("if {} {{ ({text}) }} else ", is(*id)));
        }
        self.mutated.text.push_str("{ (");
        self.write(original);
        self.mutated.text.push_str(") })");
        let ids = others.iter().map(|(id, _)| *id).collect();
        self.mutated.pieces.push(Piece { place: begin..self.mutated.text.len(), ids });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "\
impl T {
    const fn g(a: u8) -> bool { a < 3 }
    fn f(&self, a: u8) -> bool {
        const N: u8 = 1 + 1;
        match a {
            0 => true,
            n if n == N => !self.g(n),
            _ => false,
        }
    }
}
";

    fn mutant(genre: Genre, line: usize, text: &str, replacement: &str) -> Mutant {
        let column = SOURCE.lines().nth(line - 1).unwrap().find(text).unwrap() + 1;
        let end = LineColumn { line, column: column + text.len() };
        Mutant {
            name: format!("{genre:?}"),
            file: String::new(),
            genre,
            replacement: replacement.to_owned(),
            span: Place { start: LineColumn { line, column }, end },
        }
    }

    fn mutated(dropped: &[Id], constants: &[&str]) -> Mutated {
        let all = [
            mutant(Genre::FnValue, 5, "match", "true"),
            mutant(Genre::MatchArm, 6, "0", ""),
            mutant(Genre::MatchArmGuard, 7, "n ==", "false"),
            mutant(Genre::BinaryOperator, 7, "==", "!="),
            mutant(Genre::UnaryOperator, 7, "!", ""),
            mutant(Genre::BinaryOperator, 4, "+", "-"),
            mutant(Genre::BinaryOperator, 2, "<", "<="),
        ];
        let all: Vec<_> = (1..).zip(&all).collect();
        let constants = constants.iter().map(|name| (*name).to_owned()).collect();
        mutate(SOURCE, &all, &dropped.iter().copied().collect(), &constants).unwrap()
    }

    #[test]
    fn each_mutant_is_a_choice() {
        let mutated = mutated(&[], &[]);
        let text = mutated.text.replace("crate::__mutants::", "");
        for part in [
            " fn g(a: u8) -> bool { (if is(7) { ((a) <= (3)) } else { (a < 3) }) }",
            "0 if !is(2) => true",
            "n if (if is(3) { (false) } else { ((if is(4) { ((n) != (N)) } else { (n == N) })) })",
            "=> (if is(5) { (self.g(n)) } else { (!self.g(n)) }),",
            "const N: u8 = 1 + 1;",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        assert!(!text.contains("const fn"), "{text}");
        assert_eq!((mutated.chosen.len(), &mutated.constant[..]), (5, &[6][..]));
    }

    #[test]
    fn mutants_that_do_not_compile_are_left_out() {
        let mutated = mutated(&[3, 5], &["T::g"]);
        assert!(mutated.text.contains("const fn g(a: u8) -> bool { a < 3 }"), "{}", mutated.text);
        assert_eq!(mutated.constant, [7, 6]);
        assert!(!mutated.chosen.contains(&3) && !mutated.chosen.contains(&5));
    }

    #[test]
    fn an_error_belongs_to_the_innermost_mutant() {
        let mutated = mutated(&[], &[]);
        let at = mutated.text.find("(n) != (N)").unwrap();
        assert_eq!(mutated.at(&(at..at + 3)), [4]);
        let at = mutated.text.find("n == N").unwrap();
        assert_eq!(mutated.at(&(at..at + 3)), [4]);
        assert!(mutated.at(&(0..3)).is_empty());
        let line = mutated.text.find("n if").unwrap();
        assert_eq!(mutated.on_line(&(line..line + 1)), [3, 4, 4, 3, 5, 5]);
    }
}
