# Completion of peagle: commands, options, then files. For zsh, run `autoload -U bashcompinit && bashcompinit` first.
_peagle() {
  local current=${COMP_WORDS[COMP_CWORD]} word words=() found=""
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [[ $word == -* ]] && break
    words+=("$word")
  done
  if [[ $current == -* ]]; then
    found=$(peagle "${words[@]}" --help-all 2>/dev/null | grep -oE -e '--[a-z][a-z0-9-]*' | sort -u)
  elif [[ $COMP_CWORD == 1 || ($COMP_CWORD == 2 && ${words[0]} =~ ^(data|deploy)$) ]]; then
    found=$(peagle "${words[@]}" --help 2>/dev/null | sed -n 's/^  \([a-z][a-z]*\)  .*/\1/p')
  fi
  COMPREPLY=($(compgen -W "$found" -- "$current"))
}
complete -o default -F _peagle peagle
